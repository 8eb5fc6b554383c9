"""What the priority scheduler says about itself; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import RequestView, SchedulerSpec, hookimpl


class PriorityOptions(BaseModel):
    """Options of `scheduler: {name: priority}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patience: int = Field(
        default=1000,
        ge=0,
        description="Steps after its arrival from which a request goes before every class. With 0 "
        "all go in the order of arrival.",
    )


def max_overtaking_steps(options: PriorityOptions, request: RequestView) -> float:
    """Who arrives later than this many steps after a request is never admitted before it."""
    return options.patience


SPEC = SchedulerSpec(
    name="priority",
    impl="nanovllm_example_scheduler_priority.scheduler:PriorityScheduler",
    summary="Classes by the requests' priority; a request that has waited long enough goes first.",
    options=PriorityOptions,
    contract=1,
    level="scheduler",
    max_overtaking_steps=max_overtaking_steps,
)


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    return [SPEC]
