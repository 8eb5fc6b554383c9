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

    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks: int = 0
    host_seconds: float = 0.0
    steady_steps: int = 0
    steady_seconds: float = 0.0
