"""Write the documents' tables: of fields from the code, of speed from the result files.

    python docs/generate.py

Rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->`, and draws the plots of
docs/performance.md. A test fails where a document differs from what this would write.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nanovllm_core import sampling_params
from nanovllm_core.bench.plots import draw, series_of
from nanovllm_core.bench.report import ATTENTION, PERFORMANCE, Results
from nanovllm_core.config import EngineConfig
from nanovllm_core.config_errors import FLAT_KEYWORDS

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "benchmarks"
PLOT = FOLDER / "images" / "by_batch.svg"

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
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = [
        f"{words} {schema[key] if abs(schema[key]) < 2**31 else '2^63'}"
        for key, words in BOUNDS.items()
        if key in schema
    ]
    return ", ".join([TYPE_NAMES[schema["type"]], *bounds])


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
            yield f"| {' | '.join(cells)} | {field.description} |"


def field_tables() -> str:
    """One table per section of `EngineConfig`."""
    parts = []
    for path, model in sections(EngineConfig):
        rows = [*fields_of(model)]
        parts.append(f"### {f'`{path}`' if path else 'Top level'}\n\n{inspect.getdoc(model)}")
        if rows:
            head = "| key | takes | default | what it means |\n|---|---|---|---|"
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
    return "\n".join(["| argument | default | what it means |", "|---|---|---|", *rows])


TABLES: Mapping[str, Callable[[], str]] = {
    "fields": field_tables,
    "flat keywords": flat_keywords,
    "sampling": sampling_table,
}


def measured(
    tables: Mapping[str, Callable[[Results, Results], str]],
) -> Mapping[str, Callable[[], str]]:
    """Tables of the committed results: of the GPU, and of a CPU."""
    peers = BENCHMARKS / "peers.json"
    gpu = Results.read(BENCHMARKS / "results" / "h200", peers)
    cpu = Results.read(BENCHMARKS / "results" / "cpu", peers)
    return {name: partial(make, gpu, cpu) for name, make in tables.items()}


def by_batch() -> dict[str, Any]:
    """What the plot shows: the table of backends and the fixed lengths; empty without either."""
    results = Results.read(BENCHMARKS / "results" / "h200", BENCHMARKS / "peers.json")
    records = [*results.named("table").values(), *results.named("fixed_").values()]
    return series_of(records) if records else {}


def plots() -> str:
    """The plot's place in the document, where there is something to draw."""
    return f"![By batch]({PLOT.relative_to(FOLDER)})" if by_batch() else "Not measured yet."


DOCUMENTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "configuration.md": TABLES,
    "performance.md": {**measured(PERFORMANCE), "plots": plots},
    "attention_implementation.md": measured(ATTENTION),
}


def render(document: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The document with every generated part made anew."""
    for name, make in tables.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text = make()
        document, count = re.subn(
            pattern, lambda m, t=text: f"{m[1]}\n{t}\n\n{m[2]}", document, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"expected one part 'generated: {name}', found {count}")
    return document


if __name__ == "__main__":
    for file_name, file_tables in DOCUMENTS.items():
        file = FOLDER / file_name
        file.write_text(render(file.read_text(encoding="utf-8"), file_tables), encoding="utf-8")
    if by_batch():
        draw(by_batch(), PLOT)
