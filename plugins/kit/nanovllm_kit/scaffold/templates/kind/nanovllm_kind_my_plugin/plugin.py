"""What nanovllm reads of this package; importing it imports no torch.

It declares a kind, brings one plugin of that kind (`jsonl`), and an observer that makes those which
the configuration names and feeds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm_core.api import KindSpec, ObserverSpec, hookimpl
from pydantic import BaseModel, ConfigDict, Field

from nanovllm_kind_my_plugin.spec import StepSinkSpec

KIND = KindSpec(
    name="my_plugin",
    contract=2,
    spec=StepSinkSpec,
    interface="nanovllm_kind_my_plugin.spec:StepSink",
    hookspecs="nanovllm_kind_my_plugin.hookspecs",
    conformance="nanovllm_kind_my_plugin.conformance:MyPluginConformance",
    # Raise it when what a plugin of this kind must do changes.
    current_contract=1,
    summary="Places where the numbers of steps go.",
)


class JsonlOptions(BaseModel):
    """Options of the plugin `jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(default="steps.jsonl", description="The file that gets a line per step.")


JSONL = StepSinkSpec(
    name="jsonl",
    impl="nanovllm_kind_my_plugin.jsonl:JsonLines",
    summary="A line of JSON per step.",
    contract=1,
    options=JsonlOptions,
)


class ObserverOptions(BaseModel):
    """Options of the observer `my_plugin`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: dict[str, dict[str, Any]] = Field(
        default={"jsonl": {}},
        description="The plugins of this kind to feed, each with its options.",
    )


OBSERVER = ObserverSpec(
    name="my_plugin",
    impl="nanovllm_kind_my_plugin.observer:MyPluginObserver",
    summary="Feeds the plugins of the kind my_plugin.",
    contract=1,
    options=ObserverOptions,
)


@hookimpl
def nanovllm_kinds() -> Sequence[KindSpec]:
    """The kind of this package."""
    return [KIND]


@hookimpl
def nanovllm_my_plugins() -> Sequence[StepSinkSpec]:
    """The one plugin of that kind which comes with it."""
    return [JSONL]


@hookimpl
def nanovllm_observers() -> Sequence[ObserverSpec]:
    """What feeds them."""
    return [OBSERVER]
