"""From the configuration to the sampler and the executor.

Attention and kernels have more to weigh (see the modules `attention` and `kernels`), other kinds
nothing (see `decisions`).
"""

from __future__ import annotations

from typing import cast

from nanovllm_core.config.choices import PluginChoice, SamplerSettings
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import ExecutorError, shown
from nanovllm_core.interfaces.specs import (
    ExecutorSpec,
    ResolvedPlugin,
    SamplerSpec,
)
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection.fit import Candidate, select, unmet_device


def select_sampler(
    plugins: PluginManager, choice: SamplerSettings, device: str, cuda_graphs: bool
) -> ResolvedPlugin:
    """The sampler; UnsupportedError where it does not run on `device`, or not in a graph."""

    def ask(one: PluginChoice) -> Candidate:
        resolved = plugins.resolve("sampler", one.plugin, one.options, path="sampler.options")
        spec = cast(SamplerSpec, plugins.spec("sampler", one.plugin))
        reasons = unmet_device(spec.devices, device)
        if cuda_graphs and not spec.cuda_graphs:
            reasons.append("it cannot be captured; set cuda_graphs: {enforce_eager: true}")
        return Candidate(resolved, 0, tuple(reasons))

    remedy = "take sampler:gumbel out of plugins.disable"
    return select(plugins, "sampler", choice, ask, device, remedy)[0].resolved


def select_executor(plugins: PluginManager, config: EngineConfig) -> ResolvedPlugin:
    """The executor; ExecutorError where it does not span that many devices."""
    choice, size = config.executor, config.tensor_parallel_size
    resolved = plugins.resolve("executor", choice.name, choice.options, path="executor.options")
    spec = cast(ExecutorSpec, plugins.spec("executor", choice.name))
    if size > spec.max_tensor_parallel_size:
        raise ExecutorError(
            f"tensor_parallel_size: {size}, but the executor {shown(choice.name)} runs at most "
            f"{spec.max_tensor_parallel_size}; set tensor_parallel_size: 1, or install and name an "
            "executor that spans several devices"
        )
    return resolved
