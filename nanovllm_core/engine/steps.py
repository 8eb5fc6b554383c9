"""Steps in flight: what was submitted, and for whom."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm_core.engine.request import Request
from nanovllm_core.engine.rows import DecodeBatch
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class PlannedChunk:
    """A prefill chunk in flight, and which request it was planned for."""

    request: Request
    generation: int
    chunk: PrefillChunk


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step in flight: what was submitted and whom its result is for."""

    plan: StepPlan
    batch: DecodeBatch
    chunks: tuple[PlannedChunk, ...] = ()
