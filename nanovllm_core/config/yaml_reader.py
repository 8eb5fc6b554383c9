"""YAML as the configuration reads and writes it: version 1.2's core schema, with limits.

Numbers are those of JSON, besides `0o17`, `0x1F`, `.inf` and `.nan`. The only bools are `true` and
`false`; `yes`, `1:30` and `2024-01-01` are texts. Anchors, aliases and merge keys (`<<`) work. A
key written twice is an error.

Text, depth, values and aliases are counted while the text is parsed, before anything is built.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from nanovllm_core.errors import ConfigError, clip, shown

MAX_SIZE = 2**20
"""Bytes of one file, characters of any other text."""
MAX_DEPTH = 32
"""Lists and mappings within one another; also the parts of a dotted path."""
MAX_VALUES = 100_000
"""Keys, values, lists and mappings of one text, as they are written."""
MAX_ALIASED = 1000
"""The same of all that aliases repeat: a few lines of aliases may stand for billions."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_SCHEMA: dict[str, tuple[str, str]] = {
    "null": (r"null|Null|NULL|~|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""Each type's form and the first characters that a text of it may have; `\\0` is no character."""
_FORMS = {f"{_TAG}{name}": re.compile(form) for name, (form, _) in _SCHEMA.items()}


def _problem(problem: str, at: Any) -> yaml.MarkedYAMLError:
    """An error where a node or an event begins."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


class _CoreSchema(yaml.resolver.BaseResolver):
    """The unquoted scalars that are not strings."""


_CoreSchema.yaml_implicit_resolvers = {}
for _name, (_form, _first) in _SCHEMA.items():
    _CoreSchema.add_implicit_resolver(
        f"{_TAG}{_name}", re.compile(f"(?:{_form})\\Z"), ["" if c == "\0" else c for c in _first]
    )
_CoreSchema.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])


class _Loader(
    yaml.reader.Reader,
    yaml.scanner.Scanner,
    yaml.parser.Parser,
    Composer,
    yaml.constructor.SafeConstructor,
    _CoreSchema,
):
    """Counts while it composes nodes, and builds only what the core schema knows."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        _CoreSchema.__init__(self)
        self.deep_construct = True  # each node is made whole before its parent
        self._depth = 0
        self._values = 0
        self._aliased = 0
        self._sizes: dict[str, int] = {}
        """The values that each anchor stands for, where all of it has been read."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(event)
            return super().compose_node(parent, index)
        before = self._values + self._aliased
        self._values += 1
        if self._values > MAX_VALUES:
            raise _problem(f"more than {MAX_VALUES} keys and values", event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _problem(f"nested too deeply, beyond {MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._values + self._aliased - before
        return node

    def _count_alias(self, event: yaml.AliasEvent) -> None:
        name = str(event.anchor)
        if name in self.anchors and name not in self._sizes:
            raise _problem(f"the anchor {shown(name)} holds itself", event)
        self._aliased += self._sizes.get(name, 0)
        if self._aliased > MAX_ALIASED:
            raise _problem(
                f"the aliases stand for more than {MAX_ALIASED} values; write them out",
                event,
            )

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Also refuses a key written twice, of which YAML would silently keep the last."""
        node = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for key, _ in node.value:
            value = self._key(key)
            if value in seen:
                raise _problem(f"the key {shown(value)} is there twice", key)
            seen.add(value)
        return node

    def _key(self, node: yaml.Node) -> Hashable:
        if isinstance(node, yaml.ScalarNode):
            key = self.construct_object(node)
            if isinstance(key, str | int) and not isinstance(key, bool):
                return key
        kind = node.value if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise _problem(
            f"a key must be text or a whole number, not {clip(kind)}; put it in quotes",
            node,
        )

    # -- from nodes to values

    def construct_text(self, node: yaml.ScalarNode) -> str:
        value: str = self.construct_scalar(node)
        if not is_unicode(value):
            raise _problem(f"{shown(value)} has half of a surrogate pair", node)
        return value

    def _matched(self, node: yaml.ScalarNode) -> str:
        value: str = self.construct_scalar(node)
        if not _FORMS[node.tag].fullmatch(value):
            kind = node.tag.removeprefix(_TAG)
            raise _problem(f"{shown(value)} is not of the type !!{kind}; leave the tag out", node)
        return value

    def construct_null(self, node: yaml.ScalarNode) -> None:
        self._matched(node)

    def construct_bool(self, node: yaml.ScalarNode) -> bool:
        return self._matched(node).lower() == "true"

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = self._matched(node)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        sign, digits = -1 if text[0] == "-" else 1, text.lstrip("+-0ox")
        # The longest number of 64 bits has 22 digits, in octal.
        number = sign * int(digits or "0", base) if len(digits) <= 22 else None
        if number is None or not has_64_bits(number):
            raise _problem(
                f"{clip(text, 60)} is a whole number of {len(digits)} digits, beyond 64 bits; "
                "write a smaller one, or text in quotes",
                node,
            )
        return number

    def construct_float(self, node: yaml.ScalarNode) -> float:
        text = self._matched(node).lower()
        number = float(text.replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(number) and "inf" not in text:
            raise _problem(
                f"{clip(text, 60)} is too large for a number of 64 bits; write a smaller one, or "
                ".inf",
                node,
            )
        return number

    def construct_unknown(self, node: yaml.Node) -> None:
        tag = node.tag.replace(_TAG, "!!", 1)
        raise _problem(
            f"the tag {clip(tag)} is not of YAML 1.2's core schema; leave it out, and put text in "
            "quotes",
            node,
        )


_Loader.yaml_constructors = {}
for _kind, _make in {
    f"{_TAG}str": _Loader.construct_text,
    _MERGE: _Loader.construct_text,  # `<<` as a value
    f"{_TAG}null": _Loader.construct_null,
    f"{_TAG}bool": _Loader.construct_bool,
    f"{_TAG}int": _Loader.construct_int,
    f"{_TAG}float": _Loader.construct_float,
    f"{_TAG}seq": yaml.constructor.SafeConstructor.construct_yaml_seq,
    f"{_TAG}map": yaml.constructor.SafeConstructor.construct_yaml_map,
    None: _Loader.construct_unknown,
}.items():
    _Loader.yaml_constructors[_kind] = _make


class _Dumper(_CoreSchema, yaml.SafeDumper):
    """Puts in quotes what `_Loader` would not read as text."""


def has_64_bits(number: int) -> bool:
    """Whether 64 bits hold the number, with or without a sign."""
    return -(2**63) <= number < 2**64


def is_unicode(text: str) -> bool:
    """Whether it can be encoded: Python's strings may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML; ConfigError names `source`, line, column and problem."""
    if len(text) > MAX_SIZE:
        raise ConfigError(f"{clip(source)}: {len(text)} characters; at most {MAX_SIZE} are read")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, clip(error.problem or "", 500)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{clip(source)}{where}: not valid YAML: {problem}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        # PyYAML leaves to Python which character an escape names, and what a version is.
        raise ConfigError(f"{clip(source)}: not valid YAML: {clip(str(error), 500)}") from None


def read_yaml(file: str | os.PathLike[str]) -> dict[Any, Any]:
    """Read the configuration file, a mapping; an empty file is an empty mapping."""
    name = clip(str(file))
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_SIZE + 1)
        if len(content) > MAX_SIZE:
            raise ConfigError(
                f"{name}: larger than the {MAX_SIZE} bytes that are read; keep large data in a "
                "file of its own"
            )
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name with a zero byte
        raise ConfigError(f"{shown(str(file))}: cannot be read: {error}") from None
    values = parse_yaml(text, name)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}: holds {type(values).__name__} {shown(values)}; expected `key: value` lines"
        )
    return values


def flow_yaml(value: object) -> str:
    """The value as YAML on one line."""
    # In a list, for alone a scalar is followed by an end mark, and an empty key by a question mark.
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False)
    return str(text).strip()[1:-1]
