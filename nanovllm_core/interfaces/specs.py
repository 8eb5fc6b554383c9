"""The declarations of plugins: frozen specs, readable without importing torch.

A hook (see `nanovllm_core.registry.hookspecs`) returns specs; `impl` names the code, which is
imported only when the configuration selects the spec. The functions in a spec are called at start
and by listings, on the host, before anything is allocated; they must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from nanovllm_core.interfaces.attention import (
    AttentionCapabilities,
    AttentionRequirements,
    KVLayout,
)
from nanovllm_core.interfaces.scheduler import RequestView


class NoOptions(BaseModel):
    """The options model of a plugin that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """The fields of every plugin's spec; read at start and by listings, never in a step.

    `name` is the entry point's name and the name in YAML; `impl` is `"package.module:Object"`.
    `contract` is the version of its kind's contract that the plugin was written for: a number, so
    that an unchanged plugin keeps its meaning (see `nanovllm_core.registry.kinds`).
    `options` is a pydantic model that forbids unknown keys, a class of a module, so that its
    instances can be pickled; the core reads it as strict JSON, in which "1" is no number.

    The core calls every kind's `impl` with the validated options first, an instance of `options`;
    the arguments after them are the kind's.

    `needs_warm_up`: whether a step with this plugin must run before it can be captured in a CUDA
    graph, because its first run makes something and keeps it (a buffer, a communicator, a choice
    by timing). By default it must. Where no plugin of a step needs it (model, attention, kernels,
    sampler, executor), an engine starts sooner, and compiles Triton kernels in parallel.
    """

    name: str
    impl: str
    contract: int
    summary: str = ""
    options: type[BaseModel] = NoOptions
    needs_warm_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(PluginSpec):
    """An attention backend. `impl` is an `AttentionBackend` class: `Backend(options, config)`.

    `check` returns reasons beyond what `capabilities` can say (an import that is missing, an option
    that excludes a shape); it takes the requirements and the validated options.
    `kv_layouts` takes the same and returns (layout, block multiple) choices, the preferred first.
    `rank` orders candidates for `backend: auto`: among those that can serve, the highest for the
    requirements (a backend may be better at one phase, or on one device) wins.
    `provider` names the library that runs, if a backend chooses among several.
    """

    capabilities: AttentionCapabilities
    kv_layouts: Callable[[AttentionRequirements, BaseModel], Sequence[KVLayout]]
    check: Callable[[AttentionRequirements, BaseModel], list[str]] = lambda _req, _opt: []
    provider: Callable[[BaseModel], str] | None = None
    rank: Callable[[AttentionRequirements], int] = lambda _req: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(PluginSpec):
    """A scheduler. `impl` is called with the options alone.

    `level` "policy": a `SchedulingPolicy` class, an order for the core's scheduler. `level`
    "scheduler": a whole `Scheduler` class, which decides every step.
    `max_overtaking_steps(options, request)` bounds how long a request can be passed over: a request
    that arrives more than this many steps after it is never admitted before it. So finitely many
    are admitted before it, and it cannot starve. Infinity if the options allow starvation; None if
    the scheduler declares no bound. The request is in the state in which it joins the queue: on
    arrival, and again after each preemption, with its outputs so far.
    """

    level: Literal["policy", "scheduler"] = "policy"
    max_overtaking_steps: Callable[[Any, RequestView], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(PluginSpec):
    """A model architecture. `name` is the checkpoint's architecture name; `impl` a `CausalLM`.

    It is called as `Model(options, config, context)`. No configuration gives it options, so they
    are `NoOptions`: what it is follows from the checkpoint's config.json. `test_config` are
    settings to change in the small configuration, of the Llama family, that the conformance suite
    makes checkpoints of; nothing else reads them.
    """

    test_config: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(PluginSpec):
    """A source of checkpoints. `impl` is a function `(options, reference: str) -> pathlib.Path`.

    `model: NAME` calls it with an empty reference, `model: NAME:REFERENCE` with the rest. No
    configuration gives it options, so they are `NoOptions`: what it needs to know is in the
    reference.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(PluginSpec):
    """A way to run workers. `impl` is an `Executor` class."""

    max_tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClientSpec(PluginSpec):
    """A way to run engines. `impl` is an `EngineClient` class of `nanovllm_core.frontend`.

    It is called with the options, an `EngineConfig`, the name of the engine in errors, and
    `Plugins`. It runs up to `max_data_parallel_size` engines behind one door.
    """

    max_data_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec(PluginSpec):
    """A plugin that runs on some devices: `devices` are torch's types ("cuda", "cpu")."""

    devices: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(DeviceSpec):
    """A sampler. `impl` is a `Sampler` class, called with the options and a `SamplerContext`.

    `cuda_graphs` declares that `sample` may be captured. By default it may not.
    """

    cuda_graphs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec(PluginSpec):
    """A logits processor. `impl` is a `LogitsProcessor` class.

    It is called with the options and a `LogitsContext`. `arguments` is the model of one
    request's arguments, `SamplingParams(logits_processors={name: {...}})`; it forbids unknown keys.
    `check` takes valid arguments and the vocabulary's size and returns reasons to refuse that
    request, such as an id outside the vocabulary; other requests continue.
    """

    arguments: type[BaseModel] = NoOptions
    check: Callable[[Any, int], list[str]] = lambda _arguments, _vocab_size: []


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverSpec(PluginSpec):
    """A step observer. `impl` is a `StepObserver`, called with options and an `ObserverContext`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSetSpec(DeviceSpec):
    """A kernel set. `impl` makes a `KernelSet` from the options and a `torch.device`.

    `dtypes` are what it computes in, `min_compute_capability` is the oldest GPU. Of the sets that
    fit, `kernels: auto` takes the one of the highest `rank`: the core's `torch`, which fits
    everywhere, has 10, `triton` 50. A set of rank 0 serves only where it is named.

    `wake`, `"package.module:function"`, is called without arguments at the beginning of every start
    that captures steps in this process on a GPU and may take this set, on a thread beside the
    import of torch: for work that takes time and neither torch nor Python's lock. All wakers share
    the thread. An error is logged. The start may still take another set, or fail.
    """

    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"})
    min_compute_capability: tuple[int, int] | None = None
    rank: int = 0
    wake: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """A whole new kind of plugin, declared by a plugin of the kind `kind`.

    `name` is the entry point's name in the group `nanovllm.kinds`. The kind's plugins are found in
    the entry-point group `nanovllm.NAMEs` and answer the hook `nanovllm_NAMEs`, so that a listing
    knows them without importing the declaration. `spec` is the `PluginSpec` class that the hook
    returns; `hookspecs` a light module in which that hook, and any more that the declaring plugin
    calls, are marked `@hookspec`. `interface`, `"package.module:Type"`, is the type of the objects
    that its plugins make; left out, any. `current_contract` is the version of the new kind's
    contract, `oldest_contract` the oldest that its plugins may be written for; `changed` tells the
    author of an older one what to change. `conformance` names the suite that `nanovllm plugins
    test` runs on them, `"package.module:Class"`.
    """

    name: str
    contract: int
    spec: type[PluginSpec]
    hookspecs: str
    conformance: str
    interface: str = ""
    current_contract: int = 1
    oldest_contract: int = 1
    changed: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlugin:
    """One selected plugin, as rank 0 resolved it; a worker imports exactly this.

    It can be pickled, and holds what it takes to make the plugin's object in any process:
    `impl(options, ...)`, an instance of `interface` where one is stated.
    """

    kind: str
    name: str
    distribution: str
    version: str
    impl: str
    interface: str = ""
    options: BaseModel = field(default_factory=NoOptions)

    def __str__(self) -> str:
        """Kind, name, distribution and version, for messages."""
        return f"{self.kind} {self.name!r} ({self.distribution} {self.version})"
