"""The JSON Schema of the YAML file, with the options of the installed plugins in it.

Editors complete and check the file from it: `nanovllm config schema > nanovllm.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_core.config.choices import AUTO, NamedPlugin, PluginChoice, choice_models
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import PluginError
from nanovllm_core.registry.kinds import KINDS, Kind
from nanovllm_core.registry.manager import PluginManager

Schema = dict[str, Any]


def config_schema(manager: PluginManager) -> Schema:
    """The schema of the whole file. A plugin that cannot be loaded takes any options."""
    schema = EngineConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The file may leave it to the command line.
    schema["required"] = []
    models = dict(choice_models(EngineConfig))
    for kind in KINDS.values():
        if kind.choice:
            forms = {path: model for path, model in models.items() if path[0] == kind.choice}
            _place(manager, kind, forms, schema)
    del schema["$defs"]["NamedPlugin"]  # the lists referred to it
    return schema


def _place(
    manager: PluginManager,
    kind: Kind,
    forms: Mapping[tuple[str, ...], type[PluginChoice]],
    schema: Schema,
) -> None:
    """Put what names plugins of a kind in its place: a choice, one in a section, or a list."""
    definitions, there = schema["$defs"], schema["properties"][kind.choice]
    if not forms:
        definitions[kind.name] = _choice(manager, kind.name, NamedPlugin, definitions)
        there["items"] = {"$ref": f"#/$defs/{kind.name}"}
    for path, model in forms.items():
        choice = {"$ref": f"#/$defs/{model.__name__}"}
        definitions[model.__name__] = _choice(manager, kind.name, model, definitions)
        if path[1:] and "anyOf" not in there:  # one for all, or one for each part
            there["anyOf"] = [choice, {"$ref": there.pop("$ref")}]


def _choice(
    manager: PluginManager, kind: str, model: type[PluginChoice], definitions: Schema
) -> Schema:
    """A name, or a name with that plugin's options."""
    names = manager.names(kind)
    forms: list[Schema] = [{"enum": [AUTO, *names] if model.takes_auto() else names}]
    forms += [
        {
            "type": "object",
            "properties": {
                model.KEY: {"const": name},
                "options": _options(manager, kind, name, definitions),
            },
            "required": [model.KEY],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"anyOf": forms}


def _options(manager: PluginManager, kind: str, name: str, definitions: Schema) -> Schema:
    """The schema of one plugin's options; what it defines goes beside the core's definitions."""
    try:
        options = manager.spec(kind, name).options
    except PluginError as error:
        return {"type": "object", "description": f"unknown, because {error}"}
    prefix = f"{kind}.{name}."
    schema = options.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    for label, definition in schema.pop("$defs", {}).items():
        definitions[prefix + label] = definition
    return schema
