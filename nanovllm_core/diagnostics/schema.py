"""The JSON Schema of the YAML file, with the options of the installed plugins in it.

Editors complete and check the file from it: `nanovllm config schema > nanovllm.schema.json`.
"""

from __future__ import annotations

from typing import Any

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import PluginError
from nanovllm_core.registry.manager import PluginManager

Schema = dict[str, Any]


def config_schema(manager: PluginManager) -> Schema:
    """The schema of the whole file. A plugin that cannot be loaded takes any options."""
    schema = EngineConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # The file may leave it to the command line.
    schema["required"] = []
    definitions: Schema = schema["$defs"]
    for kind, name, key, default in (
        ("attention", "AttentionChoice", "backend", ("auto",)),
        ("scheduler", "SchedulerSettings", "name", ()),
        ("executor", "ExecutorSettings", "name", ()),
        ("sampler", "SamplerSettings", "name", ()),
        ("kernels", "KernelSettings", "name", ("auto",)),
    ):
        definitions[name] = _choice(manager, kind, key, default, definitions)
    pair = {"$ref": "#/$defs/AttentionSettings"}
    schema["properties"]["attention"] = {
        "description": schema["properties"]["attention"]["description"],
        "anyOf": [{"$ref": "#/$defs/AttentionChoice"}, pair],
    }
    for kind, field in (("logits_processor", "logits_processors"), ("observer", "observers")):
        definitions[kind] = _choice(manager, kind, "name", (), definitions)
        schema["properties"][field]["items"] = {"$ref": f"#/$defs/{kind}"}
    del definitions["NamedPlugin"]  # the lists referred to it
    return schema


def _choice(
    manager: PluginManager, kind: str, key: str, extra: tuple[str, ...], definitions: Schema
) -> Schema:
    """A name, or a name with that plugin's options."""
    names = manager.names(kind)
    forms: list[Schema] = [{"enum": [*extra, *names]}]
    forms += [
        {
            "type": "object",
            "properties": {
                key: {"const": name},
                "options": _options(manager, kind, name, definitions),
            },
            "required": [key],
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
