"""Messages about a wrong configuration: the path, the value, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nanovllm_core.config.choices import NamedPlugin, choice_models
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.yaml_reader import flow_yaml
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

SECTION = "a section of `key: value` lines"
EXPECTED: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_type": "text",
    "invalid_key": "text",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of {min_length} or more items",
    "dict_type": SECTION,
    "model_type": SECTION,
    "model_attributes_type": SECTION,
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
"""The requirement on a value, by the type of pydantic's error or the first word of that type; the
error's `ctx` holds the limits."""

PLUGIN_MODELS = {"AttentionSettings", NamedPlugin.__name__} | {
    model.__name__ for _, model in choice_models(EngineConfig)
}
"""What pydantic calls the sections for which a plugin's name is short."""

LAX: Mapping[str, TypeAdapter[Any]] = {
    f"{kind.__name__}_type": TypeAdapter(kind) for kind in (int, float, bool)
}
"""pydantic's readers that convert ("5" is 5, "yes" is true), by the type of the strict error."""

Location = tuple[int | str, ...]


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
    details = [detail for detail in details if not _is_counted_wrong(detail, details)]
    lines = [clip(line(detail), MAX_LINE) for detail in details[:MAX_ERRORS]]
    more = [f"... and {len(details) - MAX_ERRORS} more"] if len(details) > MAX_ERRORS else []
    return "\n".join([*lines, *more])


def _is_counted_wrong(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a tuple is called too short because pydantic counts its right items alone."""
    if detail["type"] != "too_short" or len(detail["input"]) < detail["ctx"]["min_length"]:
        return False
    own = detail["loc"]
    return any(one["loc"][: len(own)] == own for one in details if one is not detail)


def explain_config(
    error: ValidationError, sources: Mapping[str, str], commands: Iterable[str] = ()
) -> str:
    """One line for each thing wrong in an `EngineConfig`, with the source that said it.

    `commands` are installed, and each may have a section of its own.
    """

    def line(detail: ErrorDetails) -> str:
        path = dotted(place(detail))
        # A rule about several sections has no path; its message begins with one.
        location = detail["loc"] or (str(detail["ctx"]["error"]).partition(" ")[0],)
        parts = ".".join(str(part) for part in location if part != "[key]")
        in_a_phase = parts.replace("attention.", "attention.prefill.", 1)
        source = _source_of(parts, sources) or _source_of(in_a_phase, sources)
        text = explain(detail, path, partial(_hint, commands=commands)).removeprefix(": ")
        return text + (f" [{clip(source)}]" if source else "")

    return one_line_each(_once_for_both_phases(error.errors(include_url=False)), line)


def explain_options(
    error: ValidationError, options: type[BaseModel], path: str, plugin: str
) -> str:
    """One line for each wrong option; `plugin` is its name, version and distribution."""

    def hint(detail: ErrorDetails) -> str:
        if detail["type"] == "missing":
            return "; it has no default"
        return did_you_mean(str(detail["loc"][-1]), options.model_fields)

    def line(detail: ErrorDetails) -> str:
        where = ".".join(filter(None, (path, dotted(place(detail)))))
        return f"{explain(detail, where, hint, 'option')} ({plugin})"

    return one_line_each(error.errors(include_url=False), line)


def explain(
    detail: ErrorDetails, path: str, hint: Callable[[ErrorDetails], str], noun: str = "key"
) -> str:
    """`path: value, and what is allowed` for one error of pydantic's.

    `hint` says what to write where a key is unknown or missing.
    """
    value, kind = detail["input"], detail["type"]
    subject = f"{path}: {'the key ' if place(detail) != detail['loc'] else ''}{shown(value)}"
    match kind:
        case "extra_forbidden":
            return f"{path}: unknown {noun} (value {shown(value)}){hint(detail)}"
        case "missing":
            return f"{path}: missing{hint(detail)}"
        case "value_error":
            about = f"{path}:" if isinstance(value, Mapping | BaseModel) else subject
            return f"{about} {clip(str(detail['ctx']['error']), 500)}"
        case "literal_error":
            allowed = str(detail["ctx"]["expected"])
            names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
            match = did_you_mean(value, names) if isinstance(value, str) else ""
            return f"{subject} must be {allowed}{match}"
    if kind == "model_type" and detail["ctx"]["class_name"] in PLUGIN_MODELS:
        said = f"must be the name of a plugin, or {SECTION}"
    elif expected := EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0]):
        said = f"must be {expected.format(**detail.get('ctx', {}))}"
    else:
        said = clip(detail["msg"].replace("Input should", "must"), 500)
    remedy = f"; {REMEDIES[path]}" if path in REMEDIES else _as_meant(kind, value)
    return f"{subject} {said[0].lower()}{said[1:]}{remedy}"


def _as_meant(kind: str, value: object) -> str:
    """How to write what was probably meant, where a value has the wrong type."""
    if kind in ("string_type", "invalid_key") and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind in LAX and not isinstance(value, bool):
        with suppress(ValidationError):
            meant = LAX[kind].validate_python(value)
            return f"; write {flow_yaml(meant)}" if abs(meant) < 2**63 else ""
    return ""


def _once_for_both_phases(details: Iterable[ErrorDetails]) -> list[ErrorDetails]:
    """One `attention.backend` error for what is wrong in prefill and decode alike."""
    once: dict[tuple[Location, str], ErrorDetails] = {}
    for detail in details:
        first, *rest = detail["loc"] or ("",)
        in_a_phase = first == "attention" and rest and rest[0] in ("prefill", "decode")
        location = (first, *rest[1:]) if in_a_phase else detail["loc"]
        same = (location, detail["msg"])
        once[same] = {**detail, "loc": location} if same in once else detail
    return [*once.values()]


def _sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every section of the configuration with its keys."""
    keys = [*model.model_fields]
    yield path, [*keys, "backend", "options"] if path == "attention" else keys
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _sections(field.annotation, f"{path}.{name}".removeprefix("."))


SECTIONS = dict(_sections(EngineConfig))
PLACES = [f"{path}.{key}".removeprefix(".") for path, keys in SECTIONS.items() for key in keys]
PATHS = {
    place.rpartition(".")[2]: place
    for place in sorted(PLACES[::-1], key=lambda place: -place.count("."))
} | dict(FLAT_KEYWORDS)
"""Where each key belongs, by its last part or nano-vllm's name: the first of the shortest."""


def _hint(detail: ErrorDetails, commands: Iterable[str]) -> str:
    """What to write for a missing key; for an unknown one, where it belongs or one like it."""
    key = str(detail["loc"][-1])
    if detail["type"] == "missing":
        return f"; {MODEL_HINT if key == 'model' else PLUGIN_HINT}"
    if f"{key}.".startswith(tuple(f"{place}." for place in PLACES if "." in place)):
        value = clip(json.dumps(detail["input"], default=shown))
        return f"; in a file, write {key.replace('.', ': {')}: {value}{'}' * key.count('.')}"
    # What is no section is an item of a list of plugins.
    known = SECTIONS.get(dotted(detail["loc"][:-1]), [*NamedPlugin.model_fields])
    near = nearest(key, [*known, *commands] if len(detail["loc"]) == 1 else known)
    match = PATHS.get(key) or near or PATHS.get(nearest(key, PATHS) or "")
    return f"; did you mean {match}?" if match else f"; known here: {', '.join(known)}"


def _source_of(path: str, sources: Mapping[str, str]) -> str:
    """The source of the value at `path`, of a part of it, or of the section around it; or ''."""
    inside = f"{path}."
    related = (one for one in sources if inside.startswith(f"{one}.") or one.startswith(inside))
    return sources.get(path) or sources.get(next(related, ""), "")
