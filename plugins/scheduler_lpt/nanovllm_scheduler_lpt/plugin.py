"""The spec of the lpt scheduler; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import SchedulerSpec, hookimpl


class LptOptions(BaseModel):
    """Options of `scheduler: {name: lpt}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(
        default=1.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Output tokens of advantage per step of waiting. A request is passed over only "
        "by those of D more output tokens that arrive within D / ageing steps after it. 0 switches "
        "ageing off, and endless long answers can then starve a short one.",
    )
    reserve: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="The share of the outputs that running requests may still give for which "
        "blocks of the KV cache are kept free. With 1 no request is ever preempted. Less admits "
        "more requests at once where answers end long before `max_tokens`.",
    )


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    """Longest answers first, with ageing."""
    return [
        SchedulerSpec(
            name="lpt",
            impl="nanovllm_scheduler_lpt.policy:LptPolicy",
            contract=1,
            summary="Longest answer first, for batches; blocks for whole answers are reserved.",
            options=LptOptions,
        )
    ]
