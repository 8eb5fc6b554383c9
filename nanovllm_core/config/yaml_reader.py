"""YAML as the configuration reads and writes it: version 1.2's core schema, with limits.

Numbers are those of JSON, besides `0o17`, `0x1F`, `.inf` and `.nan`. The only bools are `true` and
`false`; `yes`, `1:30` and `2024-01-01` are texts. Anchors, aliases and merge keys (`<<`) work. A
key written twice is an error.

PyYAML reads the text into nodes, which are counted while they are read; the values are made here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nanovllm_core.errors import ConfigError, clip, shown

MAX_SIZE = 2**16
"""Characters of one text."""
MAX_DEPTH = 32
"""Lists and mappings within one another."""
MAX_VALUES = 100_000
"""Keys, values, lists and mappings of one text; an alias counts as all that it stands for."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"

_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], object]]] = {
    f"{_TAG}{name}": (re.compile(rf"(?:{form})\Z"), read)
    for name, form, read in (
        ("null", r"null|Null|NULL|~|", lambda text: None),
        ("bool", r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
        (
            "int",
            r"[-+]?[0-9]{1,4000}|0o[0-7]+|0x[0-9a-fA-F]+",  # int() takes 4300 digits
            lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
        ),
        (
            "float",
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
            r"|\.(nan|NaN|NAN)",
            lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
        ),
        ("merge", "<<", str),
        ("str", r"(?s:.*)", str),
    )
}
"""The form of each type's text, and the function that reads it; the first form that fits wins."""
_RESOLVERS = {None: [(tag, form) for tag, (form, _) in _SCALARS.items()]}


class _Loader(yaml.SafeLoader):
    """Finds the types of unquoted scalars by the core schema, and counts values and levels."""

    yaml_implicit_resolvers = _RESOLVERS

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = self._depth = 0
        self._sizes: dict[str | None, int] = {}
        """The values that each anchor stands for, once all of it has been read."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        anchor, before = event.anchor, self._num_values
        is_open = anchor in self.anchors and anchor not in self._sizes
        if is_open and isinstance(event, yaml.AliasEvent):
            raise _problem(f"the anchor {shown(anchor)} holds itself", event)
        self._num_values += self._sizes.get(anchor, 1)
        if self._num_values > MAX_VALUES:
            raise _problem(f"more than {MAX_VALUES} keys and values, aliases written out", event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _problem(f"nested too deeply, beyond {MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._sizes[anchor] = self._num_values - before
        return node


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what `_Loader` would not read as text."""

    yaml_implicit_resolvers = _RESOLVERS


def _problem(problem: str, at: Any) -> yaml.MarkedYAMLError:
    """An error where a node or an event begins."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def has_64_bits(number: int) -> bool:
    """Whether 64 bits hold the number, with or without a sign."""
    return -(2**63) <= number < 2**64


def is_text(text: str) -> bool:
    """Whether it is Unicode: Python's strings may hold half of a surrogate pair."""
    return re.search("[\ud800-\udfff]", text) is None


def _value(node: yaml.Node, depth: int = 1) -> Any:
    """The value of a node. What an alias names is made once more."""
    if depth > MAX_DEPTH:  # by aliases: what is written out is counted above
        raise _problem(f"nested too deeply, beyond {MAX_DEPTH} levels", node)
    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value(child, depth + 1) for child in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return _mapping(node, depth)
    raise _problem(
        f"the tag {clip(node.tag.replace(_TAG, '!!', 1))} is not of YAML 1.2's core schema, or "
        "does not go with this value; leave it out, and put text in quotes",
        node,
    )


def _scalar(node: yaml.ScalarNode) -> object:
    """The text, number, bool or null; a number has at most 64 bits."""
    text: str = node.value
    form, read = _SCALARS[node.tag]
    if not form.match(text):
        kind = node.tag.removeprefix(_TAG)
        raise _problem(
            f"{shown(text)} is not of the type !!{kind}; correct it, or leave the tag out", node
        )
    value = read(text)
    if isinstance(value, str):
        # JSON escapes a character beyond 16 bits as a pair.
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if not is_text(value):
            raise _problem(
                f"{shown(value)} has half of a surrogate pair; write the whole character", node
            )
    is_huge = value in (math.inf, -math.inf) and "inf" not in text.lower()
    if is_huge or (isinstance(value, int) and not has_64_bits(value)):
        infinity = ".inf, " if node.tag == f"{_TAG}float" else ""
        raise _problem(
            f"{clip(text, 60)} does not fit in 64 bits; write a smaller number, {infinity}or text "
            "in quotes",
            node,
        )
    return value


def _mapping(node: yaml.MappingNode, depth: int) -> dict[str | int, Any]:
    """Merge keys fill in what the mapping's own keys leave out; no key may be there twice."""
    values: dict[str | int, Any] = {}
    for key_node, value_node in node.value:
        key = _value(key_node, depth + 1)
        if type(key) not in (str, int):
            raise _problem(
                f"a key must be text or a whole number, not {shown(key)}; put it in quotes",
                key_node,
            )
        if key in values:
            raise _problem(f"the key {shown(key)} is there twice", key_node)
        values[key] = _value(value_node, depth + 1)
    if any(key_node.tag == _MERGE for key_node, _ in node.value):
        merged = values.pop("<<")
        for below in merged if isinstance(merged, list) else [merged]:
            if not isinstance(below, dict):
                raise _problem(f"<< takes a mapping or a list of them, not {shown(below)}", node)
            values = below | values
    return values


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML; ConfigError names `source`, line, column and problem."""
    where = clip(source)
    if len(text) > MAX_SIZE:
        raise ConfigError(
            f"{where}: longer than the {MAX_SIZE} characters that are read; keep large data in a "
            "file of its own"
        )
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _value(node)
    except yaml.MarkedYAMLError as error:
        problem, mark = error.problem or "", error.problem_mark
        where += f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        # PyYAML leaves to Python which character an escape names, and what a version is.
        problem = str(error)
    raise ConfigError(f"{where}: not valid YAML: {clip(problem, 500)}")


def read_yaml(file: str | os.PathLike[str]) -> dict[Any, Any]:
    """Read the configuration file, a mapping; an empty file is an empty mapping."""
    try:
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.read(MAX_SIZE + 1)
    except (OSError, ValueError) as error:  # no such file, no UTF-8, a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        hint = "; give a file, with the model's folder as `model`" if Path(file).is_dir() else ""
        raise ConfigError(f"{shown(str(file))} cannot be read: {clip(reason)}{hint}") from None
    values = parse_yaml(text, str(file))
    if values is not None and not isinstance(values, dict):
        raise ConfigError(
            f"{clip(str(file))}: holds {type(values).__name__} {shown(values)}; expected "
            "`key: value` lines"
        )
    return values or {}


def flow_yaml(value: object) -> str:
    """The value as YAML on one line."""
    # In a list, for alone a scalar is followed by an end mark, and an empty key by a question mark.
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False)
    return str(text).strip()[1:-1]
