"""Choose the kernel set: the one that is named, or the best that fits, and say why.

Nothing here imports torch: sets state what they run on as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from nanovllm_core.config.choices import KernelSettings
from nanovllm_core.errors import ConfigError, PluginError, UnsupportedError
from nanovllm_core.interfaces.specs import KernelSetSpec, ResolvedPlugin
from nanovllm_core.registry.checks import describe
from nanovllm_core.registry.discovery import install_command
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.selection.fit import Capability, unmet_capability, unmet_device, unmet_dtype

REFERENCE = "torch"
"""The core's own set, which runs on every device and is built for none."""
FUSED = "triton"
"""This project's set for GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTarget:
    """The requirements on a kernel set: a device ("cuda:0", "cpu") and a dtype ("bfloat16")."""

    device: str
    dtype: str
    compute_capability: Capability | None = None


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
    if choice.name == "auto":
        return _best(plugins, target)
    resolved = plugins.resolve("kernels", choice.name, choice.options, path="kernels.options")
    spec = cast(KernelSetSpec, plugins.spec("kernels", choice.name))
    if reasons := unmet(spec, target):
        able, _ = able_sets(plugins, target)
        names = ", ".join(selection.chosen.name for selection in able)
        raise UnsupportedError(
            f"{describe(resolved)} cannot serve: {'; '.join(reasons)}. "
            + (f"These can: {names}" if able else "No other installed set can"),
            reasons,
        )
    return KernelSelection(resolved, spec.rank)


def unmet(spec: KernelSetSpec, target: KernelTarget) -> list[str]:
    """Why a set cannot serve, with value and limit; empty where it can."""
    reasons = unmet_device(spec.devices, target.device) + unmet_dtype(spec.dtypes, target.dtype)
    if target.device.startswith("cuda"):
        reasons += unmet_capability(spec.min_compute_capability, None, target.compute_capability)
    return reasons


def able_sets(
    plugins: PluginManager, target: KernelTarget
) -> tuple[list[KernelSelection], dict[str, str]]:
    """The installed sets that can serve, best first, and why each other one cannot."""
    able: list[KernelSelection] = []
    unable: dict[str, str] = {}
    for name in plugins.names("kernels"):
        try:
            resolved = plugins.resolve("kernels", name, {}, path="kernels.options")
        except (PluginError, ConfigError) as error:
            unable[name] = str(error)
            continue
        spec = cast(KernelSetSpec, plugins.spec("kernels", name))
        if reasons := unmet(spec, target):
            unable[name] = "; ".join(reasons)
        else:
            able.append(KernelSelection(resolved, spec.rank))
    return sorted(able, key=lambda one: (-one.rank, one.chosen.name)), unable


def _best(plugins: PluginManager, target: KernelTarget) -> KernelSelection:
    """The able set of the highest rank, and what speaks against each other one."""
    able, others = able_sets(plugins, target)
    unranked = [one.chosen.name for one in able if one.rank < 1]
    others |= dict.fromkeys(unranked, "it can serve where it is named: it states no rank above 0")
    ranked = [one for one in able if one.rank > 0]
    if not ranked:
        reasons = [f"{name}: {why}" for name, why in others.items()]
        raise UnsupportedError(
            f"kernels auto: no set can serve {target.device} in {target.dtype}. "
            f"{'; '.join(reasons) or 'None is installed'}. The core's own, {REFERENCE!r}, can: "
            "take the entry that disables it out of plugins.disable",
            reasons,
        )
    best, *rest = ranked
    name = best.chosen.name
    for one in rest:
        beaten = f"it can serve, but its rank {one.rank} is not above {name}'s {best.rank}"
        others[one.chosen.name] = beaten
    if name != REFERENCE or not target.device.startswith("cuda"):
        return KernelSelection(best.chosen, best.rank, others)
    why, remedy = _missing(plugins, others)
    warning = (
        f"{target.device} runs on the kernel set {REFERENCE!r}, one torch operation after another, "
        f"for no set of a higher rank fits; {FUSED}: {why}"
    )
    return KernelSelection(best.chosen, best.rank, {FUSED: why} | others, warning, remedy)


def _missing(plugins: PluginManager, unable: Mapping[str, str]) -> tuple[str, str]:
    """Why this project's set for GPUs does not serve, and what to do about it."""
    if FUSED in unable:
        return unable[FUSED], f"choose kernels: {REFERENCE} if it is meant to be so"
    if any((plugin.kind, plugin.name) == ("kernels", FUSED) for plugin in plugins.disabled()):
        return "disabled", "take the entry that disables it out of plugins.disable"
    return "not installed", install_command("kernels", FUSED)
