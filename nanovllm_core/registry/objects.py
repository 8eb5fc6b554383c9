"""From a resolved plugin to its object: the one way for every kind, in any process."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from nanovllm_core.errors import NanoVLLMError, PluginLoadError, describe_error, shown
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.checks import pip_install
from nanovllm_core.registry.discovery import UNKNOWN


def load_object(target: str | ResolvedPlugin) -> Any:
    """Import `"package.module:Object"`, or a resolved plugin's; PluginLoadError if that fails.

    A resolved plugin of another version than the installed one is refused.
    """
    if isinstance(target, str):
        impl, owner = target, ""
    else:
        _check_version(target)
        impl, owner = target.impl, f" of {target}"
    module, _, name = impl.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and isinstance(target, ResolvedPlugin):
            package = (error.name or "").partition(".")[0]
            remedy = pip_install(target.distribution, package)
        raise PluginLoadError(
            f"cannot load {impl!r}{owner}: {describe_error(error)}{remedy and f'; {remedy}'}"
        ) from error
    return found


def make_plugin(resolved: ResolvedPlugin, *arguments: object) -> Any:
    """`impl(options, *arguments)`, checked to be an instance of the kind's interface.

    `arguments` are what the kind's interface says, in its order. Raises PluginLoadError, with kind,
    name, distribution and version, where the code cannot be imported, the call fails, or what it
    returns is of another type. The plugin's own NanoVLLMErrors pass.
    """
    if arguments and (isinstance(arguments[0], type) or get_args(arguments[0])):
        raise PluginLoadError(
            f"{resolved}: make takes no type any more: leave {shown(arguments[0])} out, "
            "and state `interface` in the kind's declaration"
        )
    implementation = load_object(resolved)
    try:
        made = implementation(resolved.options, *arguments)
    except NanoVLLMError:
        raise
    except Exception as error:
        raise PluginLoadError(
            f"{resolved}: {resolved.impl} cannot be made: {describe_error(error)}"
        ) from error
    if not resolved.interface:
        return made
    try:
        interface = load_object(resolved.interface)
        is_one = isinstance(made, interface)
    except (PluginLoadError, TypeError) as error:
        raise PluginLoadError(
            f"{resolved}: the interface {resolved.interface!r} of its kind is no type: {error}"
        ) from error
    if not is_one:
        names = " or ".join(one.__name__ for one in get_args(interface) or (interface,))
        raise PluginLoadError(
            f"{resolved}: {resolved.impl} made {shown(made)}, which is no {names}"
        )
    return made


def _check_version(resolved: ResolvedPlugin) -> None:
    if resolved.distribution == UNKNOWN:  # its entry point was given, not found installed
        return
    try:
        here = version(resolved.distribution)
    except PackageNotFoundError:
        here = "none"
    if here != resolved.version:
        raise PluginLoadError(
            f"the engine chose {resolved}, but installed here: {here}; install the same "
            "version on every machine"
        )
