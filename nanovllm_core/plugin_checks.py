"""What a plugin's declarations must look like, and how what is wrong with one is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.interfaces.specs import KindSpec, LogitsProcessorSpec, PluginSpec, ResolvedPlugin
from nanovllm_core.kinds import KIND, KIND_CONTRACT, KINDS, NO_SPEC, Kind, contract_problem
from nanovllm_core.plugin_discovery import InstalledPlugin

CORE = "nanovllm-core"
_OBJECT = re.compile(r"[\w.]+:[\w.]+")


def load_error(
    plugin: InstalledPlugin, problem: str, error: Exception | None = None
) -> PluginLoadError:
    """Name the distribution, the entry point and the original error."""
    original = f": {type(error).__name__}: {error}" if error else ""
    return PluginLoadError(
        f"{plugin.kind} {plugin.name!r} of {plugin.distribution} {plugin.version} (entry point "
        f"{plugin.entry_point}): {problem}{original}"
    )


def describe(plugin: ResolvedPlugin) -> str:
    """Kind, name, distribution and version, for messages."""
    return f"{plugin.kind} {plugin.name!r} ({plugin.distribution} {plugin.version})"


def the_one(plugin: InstalledPlugin, hook: str, wanted: type, specs: Sequence[Any]) -> Any:
    """The spec of this plugin's name among what its hook returned."""
    for strange in (spec for spec in specs if not isinstance(spec, wanted)):
        raise load_error(plugin, f"{hook} returned {strange!r}, not {wanted.__name__} objects")
    matching = [spec for spec in specs if spec.name == plugin.name]
    if len(matching) != 1:
        raise load_error(
            plugin,
            f"{hook} must return one spec named {plugin.name!r}, as the entry point is; "
            f"it returned {[spec.name for spec in specs]} (is the function marked @hookimpl?)",
        )
    return matching[0]


def check_spec(plugin: InstalledPlugin, spec: PluginSpec, kind: Kind, owner: str) -> None:
    """Refuse a spec of another contract, or one that cannot be acted upon."""
    problem = contract_problem(kind.name, kind.contract, spec.contract, owner)
    if problem:
        raise load_error(plugin, problem)
    if not _OBJECT.fullmatch(spec.impl):
        raise load_error(plugin, f"impl {spec.impl!r} is not of the form 'package.module:Object'")
    _check_model(plugin, "options", spec.options)
    if isinstance(spec, LogitsProcessorSpec):
        _check_model(plugin, "arguments", spec.arguments)


def _check_model(plugin: InstalledPlugin, field: str, model: object) -> None:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise load_error(plugin, f"{field} {model!r} is not a pydantic model class")
    if model.model_config.get("extra") != "forbid":
        raise load_error(
            plugin, f'{model.__name__} must set extra="forbid", or typos would go unnoticed'
        )


def check_kind_spec(plugin: InstalledPlugin, spec: KindSpec) -> None:
    """Refuse a declaration that no plugin could be found or checked by."""
    problem = contract_problem(KIND, KIND_CONTRACT, spec.contract, CORE)
    if problem is None and (spec.name in KINDS or spec.name in NO_SPEC):
        problem = f"{spec.name!r} is a kind of {CORE}; declare another name"
    if problem is None and not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        problem = f"{spec.name!r} must be of lower-case letters, digits and underscores"
    if problem is None and not (isinstance(spec.spec, type) and issubclass(spec.spec, PluginSpec)):
        problem = f"spec {spec.spec!r} must be a class derived from PluginSpec"
    if problem is None and spec.current_contract < 1:
        problem = f"current_contract {spec.current_contract} must be at least 1"
    if problem is None and not _OBJECT.fullmatch(spec.conformance):
        problem = f"conformance {spec.conformance!r} is not of the form 'package.module:Class'"
    if problem:
        raise load_error(plugin, problem)
