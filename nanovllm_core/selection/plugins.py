"""From the configuration to the kernel set, the sampler, the logits processors and the observers.

Attention has more to weigh; see `attention_selection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from nanovllm_core.config.choices import KernelSettings, NamedPlugin, SamplerSettings
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine.observation import close_observers
from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.observer import ObserverContext, StepObserver
from nanovllm_core.interfaces.specs import (
    KernelSetSpec,
    LogitsProcessorSpec,
    ResolvedPlugin,
    SamplerSpec,
)
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.manager import PluginManager


def kernel_set_name(choice: KernelSettings, device: str) -> str:
    """The set that is named; for `auto` the core's own for that device."""
    if choice.name != "auto":
        return choice.name
    return "triton" if device.startswith("cuda") else "torch"


def select_kernels(plugins: PluginManager, choice: KernelSettings, device: str) -> ResolvedPlugin:
    """The kernel set for `device` ("cuda:0"); UnsupportedError where it does not run there."""
    name = kernel_set_name(choice, device)
    resolved = plugins.resolve("kernels", name, choice.options, path="kernels.options")
    spec = cast(KernelSetSpec, plugins.spec("kernels", name))
    _refuse(resolved, _device_reasons(spec.devices, device), "choose kernels: auto")
    return resolved


def select_sampler(
    plugins: PluginManager, choice: SamplerSettings, device: str, cuda_graphs: bool
) -> ResolvedPlugin:
    """The sampler; UnsupportedError where it does not run on `device`, or not in a graph."""
    resolved = plugins.resolve("sampler", choice.name, choice.options, path="sampler.options")
    spec = cast(SamplerSpec, plugins.spec("sampler", choice.name))
    reasons = _device_reasons(spec.devices, device)
    if cuda_graphs and not spec.cuda_graphs:
        reasons.append("it cannot be captured; set cuda_graphs: {enforce_eager: true}")
    _refuse(resolved, reasons, "choose sampler: gumbel")
    return resolved


def _device_reasons(devices: frozenset[str], device: str) -> list[str]:
    kind = device.split(":")[0]
    return [] if kind in devices else [f"it runs on {', '.join(sorted(devices))}, device is {kind}"]


def _refuse(resolved: ResolvedPlugin, reasons: Sequence[str], remedy: str) -> None:
    if reasons:
        text = "; ".join(reasons)
        raise UnsupportedError(f"{describe(resolved)} cannot serve: {text}; or {remedy}", reasons)


def select_logits_processors(
    plugins: PluginManager, choices: Sequence[NamedPlugin]
) -> tuple[dict[str, LogitsProcessorSpec], tuple[ResolvedPlugin, ...]]:
    """What requests may ask for, by name, and what the workers load, in the order of the file."""
    resolved = tuple(
        plugins.resolve(
            "logits_processor", choice.name, choice.options, f"logits_processors[{index}].options"
        )
        for index, choice in enumerate(choices)
    )
    specs = {
        one.name: cast(LogitsProcessorSpec, plugins.spec("logits_processor", one.name))
        for one in resolved
    }
    return specs, resolved


def resolve_observers(
    plugins: PluginManager, choices: Sequence[NamedPlugin]
) -> dict[str, ResolvedPlugin]:
    """The observers, by a label that says where each is named and which distribution it is of."""
    resolved = {}
    for index, choice in enumerate(choices):
        path = f"observers[{index}]"
        one = plugins.resolve("observer", choice.name, choice.options, f"{path}.options")
        resolved[f"{path}: {describe(one)}"] = one
    return resolved


def make_observers(
    plugins: PluginManager, resolved: Mapping[str, ResolvedPlugin], config: EngineConfig
) -> dict[str, StepObserver]:
    """Make all; where one cannot be made, those before it are closed."""
    context = ObserverContext(config=config, plugins=plugins)
    made: dict[str, StepObserver] = {}
    try:
        for label, one in resolved.items():
            made[label] = plugins.make(one, StepObserver, context)
    except BaseException:
        close_observers(made)
        raise
    return made
