"""The installed plugins, from the metadata of distributions alone: nothing is imported."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from pathlib import Path

from nanovllm_core.config.sources import COMMAND_GROUP as COMMAND_GROUP
from nanovllm_core.errors import PluginNotFoundError, did_you_mean, shown
from nanovllm_core.registry.kinds import (
    EXTENSION,
    EXTENSION_GROUP,
    KIND,
    KIND_GROUP,
    KINDS,
    declared_group,
)

KNOWN_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "sdpa": ("attention_sdpa",),
    "triton": ("attention_triton", "kernels_triton"),
    "flash": ("attention_flash",),
    "sjf": ("scheduler_sjf",),
    "lpt": ("scheduler_lpt",),
    "parallel": ("executor_parallel",),
    "data-parallel": ("engine_processes",),
    "qwen3": ("model_qwen3",),
    "qwen3-moe": ("model_qwen3_moe",),
    "deepseek": ("model_deepseek",),
    "demo": ("checkpoint_demo",),
    "bench": ("bench",),
    "server": ("server", "engine_processes"),
    "kit": ("kit",),
    "flash-attn-compat": ("flash_attn_compat",),
}
"""The folders under plugins/ of what an extra of nanovllm-core installs."""

CHECKOUT = Path(__file__).parents[2]
"""The checkout, if the core is imported from one; no `plugins` lies beside an installed wheel."""

GROUP_PREFIX = "nanovllm."
"""The prefix of every kind's entry-point group."""

COMMAND_PARENTS = ("", "plugins")
"""Where a distribution may add a command: `nanovllm NAME` and `nanovllm plugins NAME`."""

SUITE_GROUP = "nanovllm.suites"
"""Conformance suites by the kind that they test; `nanovllm plugins test` imports them."""

UNKNOWN = "?"
"""Distribution and version of an entry point that was given, not found installed."""


@dataclass(frozen=True, slots=True, order=True)
class InstalledPlugin:
    """One plugin in the metadata of an installed distribution."""

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}, {self.distribution}"


def find_plugins(found: EntryPoints) -> dict[InstalledPlugin, EntryPoint]:
    """The plugins among entry points, of every kind, declared ones too."""
    groups = known_groups(found.select(group=KIND_GROUP).names)
    owner = cache(_owner)
    return {
        InstalledPlugin(kind, entry.name, *owner(entry.dist), entry.value): entry
        for group, kind in groups.items()
        for entry in found.select(group=group)
    }


def known_groups(declared: Iterable[str] = ()) -> dict[str, str]:
    """Each entry-point group that is read, and its kind; `declared` are the kinds of plugins."""
    groups = {kind.group: name for name, kind in KINDS.items()}
    groups |= {EXTENSION_GROUP: EXTENSION, KIND_GROUP: KIND}
    # A declaration cannot take a group over: loading it is an error, its name is known already.
    return {declared_group(name): name for name in declared} | groups


def _owner(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version; each look at a distribution's metadata parses all of it."""
    if distribution is None:
        return UNKNOWN, UNKNOWN
    stated = distribution.metadata
    return stated["Name"], stated["Version"]


def misplaced(name: str, found: EntryPoints) -> str:
    """A note on a plugin of that name in a group of no kind, where it is not looked for."""
    read = {*known_groups(found.select(group=KIND_GROUP).names), COMMAND_GROUP, SUITE_GROUP}
    for entry in found.select(name=name):
        if entry.group.startswith(GROUP_PREFIX) and entry.group not in read:
            owner = " ".join(_owner(entry.dist))
            return (
                f"; {shown(name)} is in the group {shown(entry.group)} of {owner}, which is that "
                f"of no installed kind{did_you_mean(entry.group, read, GROUP_PREFIX)}"
            )
    return ""


def install_one(kind: str) -> str:
    """The command that installs a plugin of a kind, one of those with `extras`."""
    first, *others = KINDS[kind].extras
    beside = f", or likewise {' or '.join(others)}" if others else ""
    return install_command(kind, first) + beside


def install_command(kind: str, name: str) -> str:
    """The command that installs a plugin of this project, one of its kind's `extras`."""
    return extra_command(KINDS[kind].extras[name])


def extra_command(extra: str) -> str:
    """The command that installs an extra of nanovllm-core, one of `KNOWN_DISTRIBUTIONS`.

    From a checkout it names the distributions' folders: what is not published has no extra on an
    index.
    """
    folders = [CHECKOUT / "plugins" / name for name in KNOWN_DISTRIBUTIONS[extra]]
    if all(map(_holds_its_distribution, folders)):
        return " ".join(("pip install", *(f"-e {shlex.quote(str(folder))}" for folder in folders)))
    return f'pip install "nanovllm-core[{extra}]"'


def _holds_its_distribution(folder: Path) -> bool:
    """Whether it is a folder of this project, and no other of that name."""
    try:
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return False
    return f'\nname = "nanovllm-{folder.name.replace("_", "-")}"\n' in project


def select_disabled(
    plugins: Iterable[InstalledPlugin], disable: Iterable[str]
) -> set[InstalledPlugin]:
    """The plugins that `plugins.disable` names; PluginNotFoundError for a name that fits none."""
    labels = {p: {p.name, f"{p.kind}:{p.name}", p.distribution} for p in plugins}
    wanted, known = [*disable], set().union(*labels.values())
    for name in wanted:
        if name not in known:
            raise PluginNotFoundError(
                f"plugins.disable: no installed plugin is {shown(name)}{did_you_mean(name, known)}"
            )
    return {plugin for plugin, names in labels.items() if not names.isdisjoint(wanted)}
