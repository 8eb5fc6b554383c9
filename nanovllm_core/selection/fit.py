"""Which plugins can serve: the one that is named, or the best, and why each other one cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from nanovllm_core.config.choices import PluginChoice
from nanovllm_core.errors import ConfigError, PluginError, UnsupportedError, in_ranges
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.discovery import install_one
from nanovllm_core.registry.manager import PluginManager

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin that was loaded and asked; `reasons` is why it cannot serve, empty if it can."""

    resolved: ResolvedPlugin
    rank: int
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.resolved.name


C = TypeVar("C", bound=Candidate)


def select(
    plugins: PluginManager,
    kind: str,
    choice: PluginChoice,
    ask: Callable[[PluginChoice], C],
    target: str,
    remedy: str,
) -> tuple[C, dict[str, str]]:
    """The plugin that is named, or of those that can serve the one of the highest rank.

    With it, of `auto`, why each other one was not taken. Raises UnsupportedError with the reasons
    and the alternatives where the named plugin, or none, can serve `target`; and whatever `ask`
    raises for the named one.
    """
    named = None if choice.is_auto else ask(choice)
    if named and not named.reasons:
        return named, {}
    able, others = rivals(plugins, kind, choice, ask)
    if named:
        names = ", ".join(one.name for one in able if one.name != named.name)
        raise UnsupportedError(
            f"{named.resolved} cannot serve {target}: {'; '.join(named.reasons)}. "
            + (f"These can: {names}" if names else f"No other installed one can; {remedy}"),
            named.reasons,
        )
    if not able:
        losers = [f"{name}: {why}" for name, why in others.items()]
        none = "All are disabled" if enable_one(plugins, kind) else "None is installed"
        raise UnsupportedError(
            f"no {kind} plugin can serve {target}. {'; '.join(losers) or none}; {remedy}",
            losers,
        )
    return able[0], others | beaten(able[0], able)


def enable_one(plugins: PluginManager, kind: str) -> str:
    """The remedy where plugins of a kind are disabled; empty where none is."""
    names = sorted({plugin.name for plugin in plugins.disabled() if plugin.kind == kind})
    return f"of those disabled, take one out of plugins.disable: {', '.join(names)}" * bool(names)


def get_one(plugins: PluginManager, kind: str) -> str:
    """The remedy where none can serve of a kind that has `extras`: enable one, or install one."""
    enable, install = enable_one(plugins, kind), install_one(kind)
    if enable and plugins.names(kind):  # Some cannot serve, and nor may those that are disabled.
        return f"{enable}, or {install}"
    return enable or install


def rivals(
    plugins: PluginManager, kind: str, choice: PluginChoice, ask: Callable[[PluginChoice], C]
) -> tuple[list[C], dict[str, str]]:
    """The installed plugins that can serve, best first, and why each other one cannot.

    Each is asked with its default options, in the form of `choice`.
    """
    able: list[C] = []
    unable: dict[str, str] = {}
    for name in plugins.names(kind):
        try:
            candidate = ask(type(choice).model_validate({choice.KEY: name}))
        except (PluginError, ConfigError) as error:
            unable[name] = str(error)
            continue
        if candidate.reasons:
            unable[name] = "; ".join(candidate.reasons)
        else:
            able.append(candidate)
    return sorted(able, key=lambda one: (-one.rank, one.name)), unable


def beaten(best: Candidate, able: Iterable[Candidate]) -> dict[str, str]:
    """Why each of the others that can serve was not taken."""
    return {
        one.name: f"it can serve, but its rank {one.rank} is not above {best.name}'s {best.rank}"
        for one in able
        if one.name != best.name
    }


def unmet_device(devices: Iterable[str], device: str) -> list[str]:
    """`device` is "cuda" or "cuda:0"; `devices` are types of torch devices."""
    return outside(devices, device.split(":")[0], "does not run on {}, only on {}")


def unmet_dtype(dtypes: Iterable[str], dtype: str) -> list[str]:
    """Names without "torch."."""
    return outside(dtypes, dtype, "does not compute in {}, only in {}")


def outside(allowed: Iterable[Any], value: object, reason: str) -> list[str]:
    """The reason, filled with the value and all that is allowed, where it is none of these."""
    return [] if value in allowed else [reason.format(value, in_order(allowed))]


def unmet_capability(
    low: Capability | None, high: Capability | None, here: Capability | None
) -> list[str]:
    """Compute capabilities, both bounds included; None is no bound, or a GPU that is not known."""
    if here is None:
        return ["depends on the GPU's compute capability, which is unknown"] if low or high else []
    reasons = []
    if low and here < low:
        reasons.append(f"needs compute capability {_dots(low)}, and this GPU has {_dots(here)}")
    if high and here > high:
        reasons.append(f"stops at compute capability {_dots(high)}, and this GPU has {_dots(here)}")
    return reasons


def in_order(values: Iterable[Any]) -> str:
    """All values in their order, whole numbers in a row as a range, for messages."""
    return ", ".join(map(str, in_ranges(values))) or "none"


def _dots(version: Capability) -> str:
    return f"{version[0]}.{version[1]}"
