"""What a plugin says about itself: frozen specs, readable without importing torch.

A hook (see `nanovllm_core.hookspecs`) returns specs; `impl` names the code, which is imported only
when the configuration selects the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from nanovllm_core.interfaces.attention import (
    AttentionCapabilities,
    AttentionRequirements,
    KVLayout,
)

CONTRACT_VERSION = 1
"""The version of the contracts in this package; a spec states the one it was written for."""


class NoOptions(BaseModel):
    """The options model of a plugin that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """What every kind of plugin states.

    `name` is the entry point's name and the name in YAML; `impl` is `"package.module:Object"`.
    """

    name: str
    impl: str
    summary: str = ""
    options: type[BaseModel] = NoOptions
    contract: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(PluginSpec):
    """An attention backend. `impl` is an `AttentionBackend` class.

    `check` returns reasons beyond what `capabilities` can say (an import that is missing, an option
    that excludes a shape); it takes the requirements and the validated options.
    `kv_layouts` takes the same and returns (layout, page multiple) choices, the preferred first.
    `rank` orders candidates for `backend: auto`: among those that can serve, the highest for the
    requirements (a backend may be better at one phase, or on one device) wins.
    `provider` names what really runs, where a backend chooses among libraries.
    """

    capabilities: AttentionCapabilities
    kv_layouts: Callable[[AttentionRequirements, BaseModel], Sequence[KVLayout]]
    check: Callable[[AttentionRequirements, BaseModel], list[str]] = lambda _req, _opt: []
    provider: Callable[[BaseModel], str] | None = None
    rank: Callable[[AttentionRequirements], int] = lambda _req: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(PluginSpec):
    """A scheduler. `impl` is a `SchedulingPolicy` class or a whole `Scheduler` class.

    `impl` is called with the validated options as its only argument.
    """

    level: Literal["policy", "scheduler"] = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(PluginSpec):
    """A model architecture. `name` is the checkpoint's architecture name; `impl` a `CausalLM`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(PluginSpec):
    """A source of checkpoints. `impl` is a function `(reference: str) -> pathlib.Path`.

    `model: NAME` calls it with an empty reference, `model: NAME:REFERENCE` with the rest.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(PluginSpec):
    """A way to run workers. `impl` is an `Executor` class."""

    max_tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlugin:
    """One selected plugin, as rank 0 resolved it; a worker imports exactly this."""

    kind: str
    name: str
    distribution: str
    version: str
    impl: str
    options: Mapping[str, object] = field(default_factory=dict)
