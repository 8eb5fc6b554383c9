"""Shared by the commands of `nanovllm plugins`: the plugin of a name, this device, `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from nanovllm_core.config.sources import load_config
from nanovllm_core.diagnostics.status import typical_requirements
from nanovllm_core.errors import PluginConflictError, PluginNotFoundError, did_you_mean, shown
from nanovllm_core.interfaces.attention import AttentionRequirements
from nanovllm_core.registry.discovery import InstalledPlugin
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager

Name = Annotated[str, typer.Argument(help="Name of the plugin.")]
KindOption = Annotated[
    str | None, typer.Option("--kind", help="Its kind, if several have that name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def installed_plugins() -> PluginManager:
    """The installed plugins, without those that the environment's `plugins.disable` names."""
    # The commands need no model, so one is made up to be able to read the rest.
    return get_plugin_manager(disable=load_config("none").plugins.disable)


def one_plugin(manager: PluginManager, name: str, kind: str | None) -> InstalledPlugin:
    """The installed plugin of that name; PluginNotFoundError or PluginConflictError if not one."""
    if kind is not None:
        return manager.find(kind, name)
    installed = manager.installed()
    kinds = sorted({plugin.kind for plugin in installed if plugin.name == name})
    # Asking for a disabled one says how it got so.
    kinds = kinds or sorted({plugin.kind for plugin in manager.disabled() if plugin.name == name})
    if not kinds:
        names = sorted({plugin.name for plugin in installed})
        hint = manager.misplaced(name) or did_you_mean(name, names)
        raise PluginNotFoundError(
            f"no plugin {shown(name)} is installed{hint}; installed: {', '.join(names) or 'none'}"
        )
    if len(kinds) > 1:
        raise PluginConflictError(
            f"{shown(name)} is the name of several plugins; say which with --kind "
            f"{' or '.join(kinds)}"
        )
    return manager.find(kinds[0], name)


def requirements_here() -> AttentionRequirements:
    """The requirements of a usual model on the device that `auto` takes."""
    import torch  # Only some commands need it.

    if not torch.cuda.is_available():
        return typical_requirements("cpu", None)
    return typical_requirements("cuda", torch.cuda.get_device_capability())
