"""`nanovllm plugins show` and `schema`: all that one plugin says about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nanovllm_core.cli.plugins import choice
from nanovllm_core.diagnostics.details import plugin_details
from nanovllm_core.diagnostics.status import plugin_status
from nanovllm_core.errors import ConfigError, shown
from nanovllm_core.registry.kinds import NO_SPEC


def show(name: choice.Name, kind: choice.KindOption = None, as_json: choice.AsJson = False) -> None:
    """Show what a plugin is, where it is defined, what it can do and whether it runs here.

    Attention backends are checked for grouped heads of size 128 on this device, in bfloat16 on a
    GPU and float32 on a CPU.
    """
    manager = choice.installed_plugins()
    plugin = choice.one_plugin(manager, name, kind)
    status = plugin_status(manager, plugin, choice.requirements_here())
    details = plugin_details(manager, status)
    if as_json:
        print(json.dumps(details, indent=2))
    else:
        print("\n".join(_lines(details)))


def schema(name: choice.Name, kind: choice.KindOption = None) -> None:
    """Print the JSON Schema of a plugin's options."""
    manager = choice.installed_plugins()
    plugin = choice.one_plugin(manager, name, kind)
    if plugin.kind in NO_SPEC:
        raise ConfigError(
            f"{plugin.kind} {shown(name)} states no options: an extension reads what stands under "
            "plugins.options itself, and a kind has none"
        )
    options = manager.spec(plugin.kind, plugin.name).options
    print(json.dumps(options.model_json_schema(), indent=2))


def _lines(details: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """`key: value` lines; what an option is stands on a line of its own."""
    for key, value in details.items():
        if key == "options":
            yield f"{indent}options:" + ("" if value else " none")
            for option in value:
                yield f"{indent}  {option['name']}: {option['type']} = {option['default']}"
                if option["description"]:
                    yield f"{indent}      {option['description']}"
        elif isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, list):
            yield f"{indent}{key}: {', '.join(map(str, value)) or 'none'}"
        else:
            yield f"{indent}{key}: {_word(value)}"


def _word(value: object) -> str:
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
