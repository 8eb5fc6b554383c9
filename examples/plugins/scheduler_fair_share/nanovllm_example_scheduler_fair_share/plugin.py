"""The spec and the options of the fair-share scheduler; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import SchedulerSpec, hookimpl

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FairShareOptions(BaseModel):
    """Options of `scheduler: {name: fair_share}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str = Field(
        default="tenant",
        min_length=1,
        max_length=64,
        description="The label of a request that names its tenant. Requests without it belong to "
        'the tenant "".',
    )
    weights: dict[str, Weight] = Field(
        default_factory=dict,
        description="Shares of tenants: 3 gets three times the tokens of 1.",
    )
    default_weight: Weight = Field(
        default=1.0, description="The share of every tenant that `weights` does not name."
    )
    ageing: float = Field(
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="Tokens that a step of waiting is worth. With 0 a request starves where new "
        "tenants arrive without end.",
    )


SPEC = SchedulerSpec(
    name="fair_share",
    impl="nanovllm_example_scheduler_fair_share.scheduler:FairShareScheduler",
    summary="Tenants share the tokens by weight; a flooding tenant delays only itself.",
    options=FairShareOptions,
    contract=1,
    level="scheduler",
)


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    return [SPEC]
