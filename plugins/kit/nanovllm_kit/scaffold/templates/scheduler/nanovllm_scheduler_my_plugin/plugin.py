"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import RequestView, SchedulerSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `scheduler: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Tokens of advantage per step of waiting. A request for an answer of A "
        "tokens is passed over only by requests that arrive within A / ageing steps after it.",
    )


def max_overtaking_steps(options: MyPluginOptions, request: RequestView) -> float:
    """How many steps after a request others may arrive and still be admitted before it."""
    answer = request.max_length - request.num_prompt_tokens
    return (answer - 1) / options.ageing


SPEC = SchedulerSpec(
    name="my_plugin",
    impl="nanovllm_scheduler_my_plugin.policy:MyPluginPolicy",
    summary="Short answers first, with ageing.",
    contract=1,
    level="policy",
    options=MyPluginOptions,
    # A promise: the tests hold it under endless traffic.
    max_overtaking_steps=max_overtaking_steps,
)


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    """The policy of this package."""
    return [SPEC]
