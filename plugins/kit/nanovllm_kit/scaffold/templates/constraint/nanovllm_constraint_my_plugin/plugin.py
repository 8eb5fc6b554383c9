"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ConstraintSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class EngineOptions(BaseModel):
    """The options of the engine: `options` beside the name in `constraints`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_length: int = Field(default=1000, ge=1, description="The longest answer, in characters.")


class RequestArguments(BaseModel):
    """What one request asks, in `SamplingParams.constraints`, by the plugin's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    characters: str = Field(
        default="0123456789", min_length=1, description="The answer has these characters alone."
    )
    length: int = Field(default=8, ge=1, description="So many of them at most.")


SPEC = ConstraintSpec(
    name="my_plugin",
    impl="nanovllm_constraint_my_plugin.constraint:MyPluginConstraint",
    summary="The answer has some characters alone.",
    contract=1,
    options=EngineOptions,
    arguments=RequestArguments,
)


@hookimpl
def nanovllm_constraints() -> Sequence[ConstraintSpec]:
    """The constraint of this package."""
    return [SPEC]
