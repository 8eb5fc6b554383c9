"""The JSON Schema of the YAML file, with the options of the installed plugins in it.

Editors complete and check the file from it: `nanovllm config schema > nanovllm.schema.json`.
"""

from __future__ import annotations

from typing import Any

from nanovllm_core.config.choices import AUTO, NamedPlugin, PluginChoice, choice_models
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import PluginError
from nanovllm_core.registry.kinds import KINDS
from nanovllm_core.registry.manager import PluginManager

Schema = dict[str, Any]


def config_schema(manager: PluginManager) -> Schema:
    """The schema of the whole file. A plugin that cannot be loaded takes any options."""
    schema = EngineConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The file may leave it to the command line.
    schema["required"] = []
    definitions, fields = schema["$defs"], schema["properties"]
    kinds = {kind.choice: kind.name for kind in KINDS.values() if kind.choice}
    for (name, *part), model in choice_models(EngineConfig):
        definitions[model.__name__] = _choice(manager, kinds[name], model, definitions)
        if part and "anyOf" not in fields[name]:  # one for all, or one for each part
            one = {"$ref": f"#/$defs/{model.__name__}"}
            fields[name]["anyOf"] = [one, {"$ref": fields[name].pop("$ref")}]
    for name, kind in kinds.items():
        if "items" in fields[name]:
            definitions[kind] = _choice(manager, kind, NamedPlugin, definitions)
            fields[name]["items"] = {"$ref": f"#/$defs/{kind}"}
    del definitions["NamedPlugin"]  # the lists referred to it
    return schema


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
