"""The contract of a step observer: it receives a record of each step and each request.

Who calls what, and when:

    Observer(options, context)     once, at start, before the model is loaded
    on_request_finished(record)    once per request (each sample is one) that ended or was aborted,
                                   before the record of the step that ended it; optional. With
                                   stop strings: once its text was searched, a few steps later
    on_step(record)                once per collected step
    close()                        once, when the engine is closed or its start fails

All are called on the engine's thread, one call after another. A request that is
unfinished when the engine is closed or fails has no record.

An observer changes nothing that the engine does. One that raises is reported to the log, with its
distribution's name, closed and not called again; the engine goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nanovllm_core.config.settings import EngineConfig
    from nanovllm_core.interfaces.plugins import Plugins

FinishReason = Literal["stop", "length", "abort", "error"]
"""A stop id or string, the request's length, its caller, or a constraint that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverContext:
    """The facts of the engine that an observer is made with.

    `plugins` resolves and makes further plugins, such as those of a kind that the observer's own
    distribution declares.
    """

    config: EngineConfig
    plugins: Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, as it stood when its result had been taken in.

    `step` counts collected steps from 1. `seconds` is the time since the step before was collected;
    for the first, and after a pause with nothing in flight, since the call that submitted it. Steps
    are launched ahead, so it is the step's share of the elapsed time, not its latency.

    `num_decode_rows` and `num_prefill_tokens` are what was computed, `num_output_tokens` the tokens
    that they gave. `num_finished` requests ended and `num_preempted` were preempted since the
    previous record. `num_running` have a row, `num_waiting` have none; `num_in_flight` steps are
    launched and not collected. `num_free_blocks` of `num_blocks` blocks are free.
    """

    step: int
    seconds: float
    num_decode_rows: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_finished: int
    num_preempted: int
    num_running: int
    num_waiting: int
    num_in_flight: int
    num_free_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that is over. Each sample of a prompt is a request with a record of its own.

    `request_id` and `index` are those of its `RequestOutput`: the id, and the number of the sample.
    `labels` are read-only. `num_cached_tokens` of the prompt's tokens were in the prefix cache at
    the first admission; the request was preempted `num_preemptions` times.

    Times are in seconds of `time.perf_counter()` in the engine's process, so only differences mean
    something. The request was added at `arrival_time`, first admitted at `first_scheduled_time`,
    and the results with its first and its last token were there at `first_token_time` and
    `finished_time`. A time is None if an aborted request never reached that point.
    """

    request_id: str
    index: int
    labels: Mapping[str, str]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float


class StepObserver(ABC):
    """Receives a record of every step. Steps wait for it, so slow work belongs in a thread."""

    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def on_step(self, record: StepRecord) -> None:
        """A step was collected; called before its outputs are returned. Must not raise."""

    def on_request_finished(self, record: RequestRecord) -> None:  # noqa: B027 - optional
        """A request ended or was aborted. Must not raise.

        Records are made only if an observer overrides this.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """The last call: flush and free resources."""
