"""The tables of docs/configuration.md: fields, keywords and sampling parameters, from the code."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nanovllm_core.config.errors import FLAT_KEYWORDS
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.interfaces import sampling_params

TYPE_NAMES = {
    "string": "text",
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "array": "list",
    "object": "mapping",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The model itself and every section in it, with its dotted path."""
    yield path, model
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            yield from sections(field.annotation, f"{path}.{name}".removeprefix("."))


def is_section(annotation: object) -> Any:
    """True for a field that is a mapping of further fields."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def allowed(schema: Mapping[str, Any]) -> str:
    """What a field takes, in words, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(allowed(one) for one in schema["anyOf"] if one["type"] != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = [f"{words} {bound(schema[key])}" for key, words in BOUNDS.items() if key in schema]
    return ", ".join([TYPE_NAMES[schema["type"]], *bounds])


def bound(value: float) -> str:
    """A limit; whole numbers near a large power of two by that power.

    >>> bound(300), bound(2**63), bound(1 - 2**63)
    ('300', '2^63', '-(2^63 - 1)')
    """
    if isinstance(value, float) or abs(value) < 2**31:
        return f"{value:g}" if isinstance(value, float) else str(value)
    exponent = (abs(value) + 1).bit_length() - 1
    less = 2**exponent - abs(value)
    power = f"2^{exponent}" if not less else f"2^{exponent} - {less}"
    return power if value > 0 else f"-({power})" if less else f"-{power}"


def default(schema: Mapping[str, Any], required: bool) -> str:
    """A field's default as one writes it in YAML."""
    if required:
        return "required"
    value = schema.get("default", {} if schema.get("type") == "object" else None)
    if value is None:
        return "left out"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    """The rows of one section's table."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if not is_section(field.annotation):
            one = schema["properties"][name]
            cells = (f"`{name}`", allowed(one), default(one, field.is_required()))
            yield f"| {' | '.join(cells)} | {' '.join((field.description or '').split())} |"


def field_tables() -> str:
    """One table per section of `EngineConfig`."""
    parts = []
    for path, model in sections(EngineConfig):
        rows = [*fields_of(model)]
        parts.append(f"### {f'`{path}`' if path else 'Top level'}\n\n{inspect.getdoc(model)}")
        if rows:
            head = "| key | takes | default | meaning |\n|---|---|---|---|"
            parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def flat_keywords() -> str:
    """nano-vllm's keyword arguments and the fields they set."""
    rows = [f"| `{keyword}` | `{field}` |" for keyword, field in FLAT_KEYWORDS.items()]
    return "\n".join(["| keyword argument | field |", "|---|---|", *rows])


def sampling_table() -> str:
    """`SamplingParams`, from the strings below its fields."""
    [definition] = [
        node
        for node in ast.parse(inspect.getsource(sampling_params)).body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    ]
    rows = []
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and node.value:
            text = inspect.cleandoc(ast.literal_eval(after.value)).replace("\n", " ")
            rows.append(f"| `{ast.unparse(node.target)}` | `{ast.unparse(node.value)}` | {text} |")
    return "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])


CONFIGURATION: Mapping[str, Callable[[], str]] = {
    "fields": field_tables,
    "flat keywords": flat_keywords,
    "sampling": sampling_table,
}
