"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import LogitsProcessorSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class EngineOptions(BaseModel):
    """The options of the engine: `options` beside the name in `logits_processors`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_occurrence: bool = Field(
        default=False,
        description="Lower an id once for each time that it stands in the window, not once.",
    )


class RequestArguments(BaseModel):
    """What one request asks, in `SamplingParams.logits_processors`, by the plugin's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(default=64, ge=1, description="How many of the last tokens count.")
    penalty: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="What is taken off their logits."
    )


SPEC = LogitsProcessorSpec(
    name="my_plugin",
    impl="nanovllm_logits_processor_my_plugin.processor:MyPluginProcessor",
    summary="Lowers the logits of the last few tokens.",
    contract=1,
    options=EngineOptions,
    arguments=RequestArguments,
)


@hookimpl
def nanovllm_logits_processors() -> Sequence[LogitsProcessorSpec]:
    """The processor of this package."""
    return [SPEC]
