"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import EngineClientSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `engine_client: {name: my_plugin}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=100, ge=1, description="A line of the log per so many messages.")


SPEC = EngineClientSpec(
    name="my_plugin",
    impl="nanovllm_engine_client_my_plugin.client:MyPluginClient",
    summary="Messages to an engine, in the log.",
    contract=1,
    options=MyPluginOptions,
)


@hookimpl
def nanovllm_engine_clients() -> Sequence[EngineClientSpec]:
    """The engine client of this package."""
    return [SPEC]
