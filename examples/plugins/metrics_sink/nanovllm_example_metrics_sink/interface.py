"""The contract of a metrics sink, version 1: what the plugins of this kind import.

Who calls what, and when:

    Sink(options)      once, at start, before the model is loaded
    write(metrics)     after every window of steps, on the engine's thread
    write_request(r)   after every request, where the observer's `requests` is on; optional
    close()            once, when the engine is closed, after the last, shorter window
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import BaseModel

from nanovllm_core.api import PluginSpec, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a window of consecutive steps did.

    `seconds` is how long they took together, and the sums are over them: steps, rows that decoded,
    prompt tokens computed, tokens given out, requests ended, requests preempted. `last_step`,
    `running`, `waiting`, `free_blocks` and `num_blocks` are as the last step of the window left
    them: its number from 1, requests with and without a row, blocks.
    """

    last_step: int
    steps: int
    seconds: float
    decoded_rows: int
    prefill_tokens: int
    output_tokens: int
    finished: int
    preempted: int
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int


class MetricsSink(ABC):
    """Takes windows of metrics to somewhere."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def write(self, metrics: Metrics) -> None:
        """Take one window. Steps wait for it: whatever takes long belongs in a thread.

        An error is logged and ends the metrics of this engine, but not the engine.
        """

    def write_request(self, request: RequestRecord) -> None:  # noqa: B027 - optional
        """Take one request that is over; what holds for `write` holds here."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """The last call: flush and free what is held. Closing twice is fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSinkSpec(PluginSpec):
    """A metrics sink. `impl` is a `MetricsSink` class, called with its options."""
