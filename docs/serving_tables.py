"""The tables of docs/serving.md: the server's settings and requests' fields, from the code."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from settings_tables import allowed, default

from nanovllm_server.bodies import Sampling, StreamOptions
from nanovllm_server.chat_body import ChatBody, ChatMessage
from nanovllm_server.completion_body import CompletionBody
from nanovllm_server.settings import ServerSettings

HEAD = "| key | takes | default | meaning |\n|---|---|---|---|"


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The model and every section in it, with its dotted path; `[]` marks one of a list."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                is_list = typing.get_origin(field.annotation) is tuple
                yield from sections(inner, f"{path}.{name}{'[]' if is_list else ''}")


def takes(schema: Mapping[str, Any]) -> str:
    """What a field takes, in words; a section has a table of its own."""
    if "anyOf" in schema:
        kinds = dict.fromkeys(takes(one) for one in schema["anyOf"] if one.get("type") != "null")
        return " or ".join(kinds)
    if "$ref" in schema:
        return "section"
    return allowed(schema) if schema.keys() & {"type", "enum", "const"} else "any"


def rows(model: type[BaseModel], but: type[BaseModel] = BaseModel) -> Iterator[str]:
    """A row for each field of a model that `but` has not."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if name not in but.model_fields:
            one = schema["properties"][name]
            is_section = "$ref" in one
            shown = "" if is_section else default(one, field.is_required())
            meaning = " ".join((field.description or "").split())
            yield f"| `{name}` | {takes(one)} | {shown} | {meaning} |"


def setting_tables() -> str:
    """A table for each section of `serve:`."""
    parts = []
    for path, model in sections(ServerSettings, "serve"):
        parts += [f"### `{path}`", str(inspect.getdoc(model)), "\n".join([HEAD, *rows(model)])]
    return "\n\n".join(parts)


def field_tables() -> str:
    """The fields of requests: of both endpoints, then of each."""
    parts = []
    for title, model, but in (
        ("Both endpoints", Sampling, BaseModel),
        ("`/v1/completions`", CompletionBody, Sampling),
        ("`/v1/chat/completions`", ChatBody, Sampling),
        ("A message of `messages`", ChatMessage, BaseModel),
        ("`stream_options`", StreamOptions, BaseModel),
    ):
        parts += [f"### {title}", "\n".join([HEAD.replace("key", "field"), *rows(model, but)])]
    return "\n\n".join(parts)


def refused_list() -> str:
    """OpenAI's fields that are refused, and the values that are taken all the same."""
    lines = []
    for title, model in (
        ("`/v1/completions`", CompletionBody),
        ("`/v1/chat/completions`", ChatBody),
        ("a message", ChatMessage),
        ("`stream_options`", StreamOptions),
    ):
        names = ", ".join(f"`{name}`" for name in sorted(model.NEUTRAL))
        lines.append(f"- {title}: {names}")
    return "\n".join(lines)


SERVING: Mapping[str, Callable[[], str]] = {
    "settings": setting_tables,
    "fields": field_tables,
    "refused": refused_list,
}
