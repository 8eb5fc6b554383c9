"""Choose the kernel set: the one that is named, or the best that fits, and say why.

Nothing here imports torch: sets state what they run on as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from nanovllm_core.config.choices import KernelSettings, PluginChoice
from nanovllm_core.interfaces.attention import AttentionRequirements
from nanovllm_core.interfaces.specs import KernelSetSpec, ResolvedPlugin
from nanovllm_core.registry.discovery import install_command
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection import fit

REFERENCE = "torch"
"""The core's own set, which runs on every device and is built for none."""
ENABLE_REFERENCE = (
    f"the core's own, {REFERENCE!r}, can: take the entry that disables it out of plugins.disable"
)
FUSED = "triton"
"""This project's set for GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTarget:
    """The requirements on a kernel set: a device ("cuda:0", "cpu") and a dtype ("bfloat16")."""

    device: str
    dtype: str
    compute_capability: fit.Capability | None = None


@dataclass(frozen=True, slots=True)
class KernelSelection:
    """The kernel set of an engine; of `auto`, why each other installed set was not taken."""

    chosen: ResolvedPlugin
    rank: int
    others: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""
    """Of a GPU on which `auto` finds the reference alone, and `remedy` what to do about it."""
    remedy: str = ""

    @property
    def report(self) -> tuple[str, ...]:
        """The choice in lines, as those of attention are."""
        losers = (f"kernels auto: not {name}: {why}" for name, why in self.others.items())
        return (*losers, f"kernels: {self.chosen.name} {self.chosen.version}")


def select_kernels(
    plugins: PluginManager, choice: KernelSettings, target: KernelTarget
) -> KernelSelection:
    """The set that is named, or of those that fit the one of the highest rank.

    Raises UnsupportedError where the named set, or none, can serve; ConfigError for a wrong option;
    PluginError where the named set cannot be loaded.
    """

    def ask(one: PluginChoice) -> fit.Candidate:
        resolved = plugins.resolve("kernels", one.plugin, one.options, path="kernels.options")
        spec = cast(KernelSetSpec, plugins.spec("kernels", one.plugin))
        reasons = unmet(spec, target)
        if choice.is_auto and not reasons and spec.rank < 1:
            reasons.append("it can serve where it is named: it states no rank above 0")
        return fit.Candidate(resolved, spec.rank, tuple(reasons))

    where = f"{target.device} in {target.dtype}"
    taken, others = fit.select(plugins, "kernels", choice, ask, where, ENABLE_REFERENCE)
    on_reference = choice.is_auto and taken.name == REFERENCE
    if not on_reference or not target.device.startswith("cuda"):
        return KernelSelection(taken.resolved, taken.rank, others)
    why, remedy = _missing(plugins, others)
    warning = (
        f"{target.device} runs on the kernel set {REFERENCE!r}, one torch operation after another, "
        f"for no set of a higher rank fits; {FUSED}: {why}"
    )
    return KernelSelection(taken.resolved, taken.rank, {FUSED: why} | others, warning, remedy)


def unmet(spec: KernelSetSpec, target: KernelTarget | AttentionRequirements) -> list[str]:
    """Why a set cannot serve, with value and limit; empty where it can."""
    reasons = fit.unmet_device(spec.devices, target.device)
    reasons += fit.unmet_dtype(spec.dtypes, target.dtype)
    if target.device.startswith("cuda"):
        low, here = spec.min_compute_capability, target.compute_capability
        reasons += fit.unmet_capability(low, None, here)
    return reasons


def _missing(plugins: PluginManager, unable: Mapping[str, str]) -> tuple[str, str]:
    """Why this project's set for GPUs does not serve, and what to do about it."""
    if FUSED in unable:
        return unable[FUSED], f"choose kernels: {REFERENCE} if it is meant to be so"
    if any((plugin.kind, plugin.name) == ("kernels", FUSED) for plugin in plugins.disabled()):
        return "disabled", "take the entry that disables it out of plugins.disable"
    return "not installed", install_command("kernels", FUSED)
