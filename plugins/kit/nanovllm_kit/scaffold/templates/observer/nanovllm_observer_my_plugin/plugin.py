"""The spec of this plugin. nanovllm imports this module to list it; it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ObserverSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field


class MyPluginOptions(BaseModel):
    """Options of `observers: [{name: my_plugin}]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=100, ge=1, description="A line of the log per so many steps.")


SPEC = ObserverSpec(
    name="my_plugin",
    impl="nanovllm_observer_my_plugin.observer:MyPluginObserver",
    summary="Rates and waits, in the log.",
    contract=1,
    options=MyPluginOptions,
)


@hookimpl
def nanovllm_observers() -> Sequence[ObserverSpec]:
    """The observer of this package."""
    return [SPEC]
