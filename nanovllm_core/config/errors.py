"""Messages about a wrong configuration: the path, the value, and what would be right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nanovllm_core.config.choices import NamedPlugin
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import clip, did_you_mean, nearest, shown

MAX_ERRORS = 20
"""That one message lists; of the others it says how many there are."""
MAX_LINE = 800
"""Characters of one of them."""

FLAT_KEYWORDS: Mapping[str, str] = {
    "max_num_batched_tokens": "limits.max_num_batched_tokens",
    "max_num_seqs": "limits.max_num_seqs",
    "max_model_len": "limits.max_model_len",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "kvcache_block_size": "cache.block_size",
    "num_kvcache_blocks": "cache.num_blocks",
    "enforce_eager": "cuda_graphs.enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
}
"""nano-vllm's keyword arguments and the fields they set."""

REMEDIES: Mapping[str, str] = {"cache.num_blocks": "leave it out for as many as fit"}
"""The remedy, by path, for values that nano-vllm writes as -1."""

MODEL_HINT = (
    "name a folder with a checkpoint, a checkpoint plugin (demo) or a model of the Hugging Face "
    "hub (Qwen/Qwen3-0.6B)"
)
PLUGIN_HINT = "name the plugin; nanovllm plugins list shows those that are installed"

EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "invalid_key": "text",
    "string_too_short": "text of {min_length} or more characters",
    "list_type": "a list",
    "string_unicode": "text without half of a surrogate pair",
    "too_long": "a list of at most {max_length} items",
    "tuple_type": "a list",
    "dict_type": "a section of `key: value` lines",
    "model_type": "a section of `key: value` lines",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
"""The requirement on a value, by the type of pydantic's error; its `ctx` holds the limits."""

BOOL_WORDS: Mapping[str, str] = dict.fromkeys(("true", "yes", "on", "y", "1"), "true") | (
    dict.fromkeys(("false", "no", "off", "n", "0"), "false")
)
"""How YAML 1.1 and others write the two bools; here they are texts and numbers."""
NUMBERS: Mapping[str, re.Pattern[str]] = {
    "int_type": re.compile(r"[-+]?[0-9]{1,18}"),
    "float_type": re.compile(r"[-+]?[0-9]{1,18}([.][0-9]{1,18})?(e[-+]?[0-9]{1,2})?"),
}
"""Texts that are a number without their quotes, by the type of pydantic's error."""

Location = tuple[int | str, ...]

PluginTuple = tuple[NamedPlugin, ...]
PLUGIN_KEYS = tuple(NamedPlugin.model_fields)


def dotted(location: Location) -> str:
    """`("cuda_graphs", "sizes", 2)` -> `cuda_graphs.sizes[2]`; long keys are cut."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{clip(part, 80)}" for part in location]
    return clip("".join(parts).removeprefix("."), 400)


def place(detail: ErrorDetails) -> Location:
    """The path of an error's value; for a key that cannot be a path, the section that holds it."""
    location = detail["loc"]
    if detail["type"] == "invalid_key":
        return location[:-1]
    return location[:-2] if location[-1:] == ("[key]",) else location


def one_line_each(details: Sequence[ErrorDetails], line: Callable[[ErrorDetails], str]) -> str:
    """The lines of the first errors, and how many more there are."""
    lines = [clip(line(detail), MAX_LINE) for detail in details[:MAX_ERRORS]]
    if len(details) > MAX_ERRORS:
        lines.append(f"... and {len(details) - MAX_ERRORS} more")
    return "\n".join(lines)


def explain_config(
    error: ValidationError, sources: Mapping[str, str], file: str | None = None
) -> str:
    """One line for each thing wrong in an `EngineConfig`, with the source that said it.

    `file` is the configuration file, if there is one: it is where something missing would stand.
    """

    def line(detail: ErrorDetails) -> str:
        path = dotted(place(detail))
        parts = [str(part) for part in detail["loc"] if part != "[key]"]
        source = _source_of(".".join(parts), sources) or ""
        if detail["type"] == "missing":
            hint = MODEL_HINT if path == "model" else PLUGIN_HINT
            text, source = f"{path}: missing; {hint}", source or file or ""
        else:
            text = explain(detail, path, _key_hint).removeprefix(": ")
        remedy = f"; {REMEDIES[path]}" if path in REMEDIES else ""
        return text + remedy + (f" [{clip(source)}]" if source else "")

    return one_line_each([*_once_for_both_phases(error.errors(include_url=False))], line)


def explain_options(
    error: ValidationError, options: type[BaseModel], path: str, plugin: str
) -> str:
    """One line for each wrong option; `plugin` is its name, version and distribution."""

    def hint(detail: ErrorDetails) -> str:
        return did_you_mean(str(detail["loc"][-1]), options.model_fields)

    def line(detail: ErrorDetails) -> str:
        where = ".".join(filter(None, (path, dotted(place(detail)))))
        return f"{explain(detail, where, hint, 'option')} ({plugin})"

    return one_line_each(error.errors(include_url=False), line)


def explain(
    detail: ErrorDetails, path: str, key_hint: Callable[[ErrorDetails], str], noun: str = "key"
) -> str:
    """`path: value, and what is allowed` for one error of pydantic's."""
    value, kind = detail["input"], detail["type"]
    subject = f"{path}: {'the key ' if place(detail) != detail['loc'] else ''}{shown(value)}"
    match kind:
        case "extra_forbidden":
            return f"{path}: unknown {noun} (value {shown(value)}){key_hint(detail)}"
        case "missing":
            return f"{path}: missing; it has no default"
        case "value_error":
            about = f"{path}:" if isinstance(value, Mapping | BaseModel) else subject
            return f"{about} {clip(str(detail['ctx']['error']), 500)}"
        case "literal_error":
            allowed = str(detail["ctx"]["expected"])
            names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
            match = did_you_mean(value, names) if isinstance(value, str) else ""
            return f"{subject} must be {allowed}{match}"
    if kind in EXPECTED:
        expected = EXPECTED[kind].format(**detail.get("ctx", {}))
        return f"{subject} must be {expected}{_as_meant(kind, value)}"
    message = clip(detail["msg"].replace("Input should", "must"), 500)
    return f"{subject} {message[0].lower()}{message[1:]}"


def _as_meant(kind: str, value: object) -> str:
    """How to write what was probably meant, where a value has the wrong type."""
    if kind.startswith("bool_") and isinstance(value, str | int):
        word = BOOL_WORDS.get(shown(value).strip("'").lower())
        return f"; write {word}" if word else ""
    if kind in NUMBERS and isinstance(value, str) and NUMBERS[kind].fullmatch(value):
        return f"; write {value} without quotes"
    if kind in ("string_type", "invalid_key") and isinstance(value, bool | int | float):
        return "; put it in quotes"
    return ""


def _once_for_both_phases(details: Iterable[ErrorDetails]) -> Iterator[ErrorDetails]:
    """One `attention.backend` error for what is wrong in prefill and decode alike."""
    details = [*details]
    seen = {(detail["loc"], detail["msg"]) for detail in details}
    for detail in details:
        location = detail["loc"]
        if location[0:1] == ("attention",) and location[1:2] in (("prefill",), ("decode",)):
            rest = location[2:]
            phases = [
                (("attention", phase, *rest), detail["msg"]) for phase in ("prefill", "decode")
            ]
            if all(phase in seen for phase in phases):
                if location[1] == "prefill":
                    yield {**detail, "loc": ("attention", *rest)}
                continue
        yield detail


def _fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Every (parent path, key) that the configuration has."""
    for name, field in model.model_fields.items():
        yield path, name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{path}.{name}".removeprefix("."))
        elif field.annotation == PluginTuple:
            yield from ((f"{path}.{name}".removeprefix(".") + "[]", key) for key in PLUGIN_KEYS)
    if path == "attention":
        yield from ((path, "backend"), (path, "options"))


def _key_hint(detail: ErrorDetails) -> str:
    """How to write a dotted key; else the same name elsewhere, or a like one here or elsewhere."""
    location = detail["loc"]
    key, parent = str(location[-1]), dotted(location[:-1])
    parent = re.sub(r"\[\d+\]", "[]", parent)
    siblings = [name for path, name in _fields(EngineConfig) if path == parent]
    elsewhere = {
        name: f"{path}.{name}".removeprefix(".")
        for path, name in _fields(EngineConfig)
        if not path.endswith("[]")
    }
    known = [f"{path}.{name}." for path, name in _fields(EngineConfig) if path]
    if f"{key}.".startswith((*known,)):
        return f"; in a file, write {_as_section(key, detail['input'])}"
    elsewhere |= FLAT_KEYWORDS
    if key in elsewhere:
        return f"; did you mean {elsewhere[key]}?"
    match = nearest(key, siblings) or elsewhere.get(nearest(key, elsewhere) or "")
    return f"; did you mean {match}?" if match else f"; known here: {', '.join(siblings)}"


def _as_section(path: str, value: object) -> str:
    """`("cache.block_size", 32)` -> `cache: {block_size: 32}`."""
    first, *rest = path.split(".")
    inside = "".join(f"{{{name}: " for name in rest)
    return f"{first}: {inside}{clip(json.dumps(value, default=shown))}{'}' * len(rest)}"


def _source_of(path: str, sources: Mapping[str, str]) -> str | None:
    """The source of the value at `path`, of a part of it, or of the section around it."""
    if path in sources:
        return sources[path]
    for known, source in sources.items():
        phases = {known, known.replace(".prefill.", ".", 1), known.replace(".decode.", ".", 1)}
        if any(f"{path}.".startswith(f"{name}.") or name.startswith(f"{path}.") for name in phases):
            return source
    return None
