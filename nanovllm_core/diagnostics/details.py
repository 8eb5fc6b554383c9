"""All that an installed plugin says about itself, as plain data: behind `nanovllm plugins show`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from nanovllm_core.diagnostics.status import PluginStatus, find_module
from nanovllm_core.errors import in_ranges
from nanovllm_core.interfaces.specs import PluginSpec
from nanovllm_core.registry.discovery import InstalledPlugin
from nanovllm_core.registry.hookspecs import PROJECT
from nanovllm_core.registry.kinds import EXTENSION, KIND
from nanovllm_core.registry.manager import PluginManager


def plugin_details(manager: PluginManager, status: PluginStatus) -> dict[str, object]:
    """The plugin's own words, and whether it runs here; plain values only.

    Raises PluginLoadError where the plugin cannot be loaded.
    """
    plugin = status.plugin
    details: dict[str, object] = {
        "kind": plugin.kind,
        "name": plugin.name,
        "distribution": f"{plugin.distribution} {plugin.version}",
        "defined in": _where(plugin),
        "runs here": status.state if not status.reasons else "; ".join(status.reasons),
    }
    if plugin.kind == EXTENSION:
        return details | {"hooks": _hooks(manager, plugin)}
    if plugin.kind == KIND:
        return details | _declaration(manager, plugin.name)
    spec = manager.spec(plugin.kind, plugin.name)
    details |= {
        "summary": spec.summary,
        "implementation": spec.impl,
        "contract": spec.contract,
        "current contract": manager.kind(plugin.kind).contract,
    }
    common = {field.name for field in fields(PluginSpec)}
    own = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in common}
    for name, value in own.items():
        if value is not None and (_is_model(value) or not callable(value)):
            details[name.replace("_", " ")] = _plain(value)
    details["options"] = options_of(spec.options)
    return details


def _declaration(manager: PluginManager, name: str) -> dict[str, object]:
    """The kind that a plugin declares, and that kind's plugins."""
    kind = manager.kind(name)
    return {
        "summary": manager.declaration(name).summary,
        "entry-point group": kind.group,
        "hook": kind.hook,
        "spec": f"{kind.spec.__module__}:{kind.spec.__qualname__}",
        "current contract": kind.contract,
        "conformance": kind.conformance,
        "plugins": manager.names(name),
    }


def _hooks(manager: PluginManager, plugin: InstalledPlugin) -> list[str]:
    """The hooks that an extension implements."""
    manager.enable([plugin.name])
    module = importlib.import_module(plugin.entry_point.partition(":")[0])
    return [name for name, value in vars(module).items() if hasattr(value, f"{PROJECT}_impl")]


def options_of(model: type[BaseModel]) -> list[dict[str, object]]:
    """The options of a plugin in the order in which they are declared.

    `default` is "required" where there is none.
    """
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "type": _type_name(one, schema.get("$defs", {})),
            "default": "required" if name in required else one.get("default"),
            "description": one.get("description", ""),
        }
        for name, one in schema.get("properties", {}).items()
    ]


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _plain(value: Any) -> object:
    if _is_model(value):
        return {str(one["name"]): one["type"] for one in options_of(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name.replace("_", " "): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Set):
        return in_ranges(value)
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _type_name(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema's type on one line: `integer`, `fa2 | fa3`, `number or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return _type_name(definitions.get(name, {"type": name}), definitions)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return " or ".join(_type_name(one, definitions) for one in schema["anyOf"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_type_name(schema['items'], definitions)}"
    return str(schema.get("type", "any"))


def _where(plugin: InstalledPlugin) -> str:
    """The light module and its file, found without importing it."""
    module = plugin.entry_point.partition(":")[0]
    found = find_module(module)
    return f"{module} ({found.origin})" if found else f"{module} (not found)"
