"""The spec of the sjf scheduler; importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import RequestView, SchedulerSpec, hookimpl


class SjfOptions(BaseModel):
    """Options of `scheduler: {name: sjf}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ageing: float = Field(
        default=16.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Prompt tokens of advantage per step of waiting. A prompt of W tokens is "
        "passed over only by requests that arrive within W / ageing steps after it. 0 switches "
        "ageing off, and endless short prompts can then starve a long one.",
    )


def max_overtaking_steps(options: SjfOptions, request: RequestView) -> float:
    """How many steps after a request others may arrive and still be admitted before it.

    (work - 1) / ageing, as `nanovllm_scheduler_sjf.policy` derives; infinite with ageing off.
    """
    if options.ageing == 0:
        return float("inf")
    return (request.num_tokens - request.num_scheduled - 1) / options.ageing


@hookimpl
def nanovllm_schedulers() -> Sequence[SchedulerSpec]:
    """Shortest job first, with ageing."""
    return [
        SchedulerSpec(
            name="sjf",
            impl="nanovllm_scheduler_sjf.policy:SjfPolicy",
            contract=1,
            summary="Shortest prompt first, with ageing.",
            options=SjfOptions,
            max_overtaking_steps=max_overtaking_steps,
        )
    ]
