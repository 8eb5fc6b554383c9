"""The engine's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine started, and how things stand.

    `finished` requests ended, aborted ones among them; each sample counts.
    `host_seconds` is the time spent in `step()` outside waiting for results: planning, submitting
    and taking results in. `steady_seconds` is its part in the `steady_steps` calls that submitted a
    decode step of the very rows of the step before.
    """

    steps: int
    preemptions: int
    prefix_hit_tokens: int
    output_tokens: int
    finished: int
    running: int
    waiting: int
    free_blocks: int
    blocks: int
    host_seconds: float
    steady_steps: int
    steady_seconds: float
