"""Every extension point, on one screen.

A plugin is a light module of functions marked `@hookimpl`, named by an entry point whose group is
its kind. Importing it imports no torch. Hooks run at start or shutdown, never inside a step.

A hook that returns specs is asked of one module alone, when a plugin of it is selected or listed;
it may be asked more than once and must return the same. The others are called for every module that
is loaded, once per engine; an error in one stops the start. Arguments may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from nanovllm_core.config.settings import EngineConfig
    from nanovllm_core.interfaces import specs
    from nanovllm_core.interfaces.constraint import ConstraintSpec
    from nanovllm_core.interfaces.doctor import DoctorCheck
    from nanovllm_core.interfaces.plan import WorkerInfo
    from nanovllm_core.interfaces.plugins import Plugins

PROJECT = "nanovllm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def nanovllm_attention() -> Sequence[specs.AttentionSpec]:
    """Attention backends (entry-point group `nanovllm.attention`)."""


@hookspec
def nanovllm_schedulers() -> Sequence[specs.SchedulerSpec]:
    """Scheduling policies and whole schedulers (group `nanovllm.schedulers`)."""


@hookspec
def nanovllm_models() -> Sequence[specs.ModelSpec]:
    """Model architectures (group `nanovllm.models`; the entry point is the architecture's name)."""


@hookspec
def nanovllm_checkpoints() -> Sequence[specs.CheckpointSpec]:
    """Sources of checkpoints (group `nanovllm.checkpoints`)."""


@hookspec
def nanovllm_executors() -> Sequence[specs.ExecutorSpec]:
    """Ways to run workers (group `nanovllm.executors`)."""


@hookspec
def nanovllm_engine_clients() -> Sequence[specs.EngineClientSpec]:
    """Ways to run engines and to reach them (group `nanovllm.engine_clients`)."""


@hookspec
def nanovllm_samplers() -> Sequence[specs.SamplerSpec]:
    """Samplers: greedy and temperature choice on the device (group `nanovllm.samplers`)."""


@hookspec
def nanovllm_logits_processors() -> Sequence[specs.LogitsProcessorSpec]:
    """Changes of logits, for requests that use them (group `nanovllm.logits_processors`)."""


@hookspec
def nanovllm_constraints() -> Sequence[ConstraintSpec]:
    """Constraints, such as grammars, for requests that use them (`nanovllm.constraints`)."""


@hookspec
def nanovllm_observers() -> Sequence[specs.ObserverSpec]:
    """Observers of steps, such as metrics (group `nanovllm.observers`)."""


@hookspec
def nanovllm_kernels() -> Sequence[specs.KernelSetSpec]:
    """Sets of the fused operations that layers are built on (group `nanovllm.kernels`)."""


@hookspec
def nanovllm_kinds() -> Sequence[specs.KindSpec]:
    """New kinds of plugins (group `nanovllm.kinds`)."""


@hookspec
def nanovllm_configure(config: EngineConfig, plugins: Plugins) -> None:
    """Every plugin is chosen and checked, no weight is read; `plugins` makes further ones."""


@hookspec
def nanovllm_engine_started(info: WorkerInfo) -> None:
    """The model is loaded, the KV cache is sized, graphs are captured; no request is known yet."""


@hookspec
def nanovllm_engine_closed() -> None:
    """The engine was closed; the device is free. Not called if the start failed."""


@hookspec
def nanovllm_cli(app: typer.Typer) -> None:
    """Add commands to `nanovllm`, each time it is run (group `nanovllm.extensions`)."""


@hookspec
def nanovllm_doctor() -> Sequence[DoctorCheck]:
    """Checks of this plugin's environment, for `nanovllm plugins doctor`."""
