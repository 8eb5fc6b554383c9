"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import SchedulerSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `scheduler: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_prompts: int = Field(
        default=8,
        ge=1,
        description="How many prompts may share a step; with 1 they are read one after the other.",
    )


SPEC = SchedulerSpec(
    name="my_plugin",
    impl="nanovllm_scheduler_my_plugin.scheduler:MyPluginScheduler",
    summary="Prompts share each step evenly, in order of arrival.",
    contract=1,
    level="scheduler",
    options=MyPluginOptions,
    # No later request is admitted first. The suite checks this bound.
    max_overtaking_steps=lambda _options, _request: 0,
)


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    """The scheduler of this package."""
    return [SPEC]
