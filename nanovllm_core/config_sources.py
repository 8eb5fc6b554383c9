"""Where the configuration comes from, and what wins.

Highest first:

1. keyword arguments and command-line flags (`load_config(..., overrides=...)`),
2. the environment: `NANOVLLM_ATTENTION__BACKEND=flash`; two underscores go one level down, values
   are read as YAML,
3. the YAML file,
4. the defaults of `EngineConfig`.

Sections are merged key by key. A layer that names another plugin (an attention backend, a
scheduler, an executor) replaces the lower layer's choice whole: options belong to the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nanovllm_core.config import EngineConfig
from nanovllm_core.config_choices import expand_attention, expand_name
from nanovllm_core.config_errors import EXPECTED, FLAT_KEYWORDS, explain_config
from nanovllm_core.errors import ConfigError

ENV_PREFIX = "NANOVLLM_"

REFUSED_KEYWORDS: Mapping[str, str] = {
    "eos": "drop it; every end-of-sequence id of the checkpoint's generation_config is honoured",
    "hf_config": "drop it; the checkpoint's config.json is read when the engine starts",
}
"""Keywords of nano-vllm that have no field here, and what to do instead."""

CHOICES: Mapping[tuple[str, ...], str] = {
    ("attention", "prefill"): "backend",
    ("attention", "decode"): "backend",
    ("scheduler",): "name",
    ("executor",): "name",
    ("sampler",): "name",
    ("kernels",): "name",
}
"""Where a plugin is chosen, and the key that names it."""

NAMED = ("scheduler", "executor", "sampler", "kernels")
"""Sections for which the name alone will do."""

TreePath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value of the configuration and who gave it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the source of each value that is not a default, by dotted path."""

    config: EngineConfig
    sources: Mapping[str, str]


def load_config(
    model: str | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] = os.environ,
) -> EngineConfig:
    """Build the configuration; see the module for what wins.

    `overrides` are fields of `EngineConfig` (`attention="triton"`, `limits={...}`), dotted paths
    (`"cache.block_size"`) or nano-vllm's flat keywords (`FLAT_KEYWORDS`). Raises ConfigError, which
    names path, value and remedy of everything that is wrong.
    """
    return load_with_sources(model, file=file, overrides=overrides, env=env).config


def load_with_sources(
    model: str | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] = os.environ,
) -> LoadedConfig:
    """As `load_config`, and tell where each value came from."""
    arguments = [*(overrides or {}).items()]
    if model is not None:
        arguments.append(("model", model))
    tree: dict[str, Any] = {}
    if file is not None:
        tree = merge(tree, tag(read_yaml(file), str(file)))
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            tree = merge(tree, tag(_from_environment(name, env[name]), name))
    tree = merge(tree, tag(nest_keywords(arguments), "argument"))
    sources = {".".join(path): leaf.source for path, leaf in leaves(tree)}
    try:
        config = EngineConfig.model_validate(untag(tree))
    except ValidationError as error:
        raise ConfigError(explain_config(error, sources)) from None
    return LoadedConfig(config, sources)


# ------------------------------------------------------------------------------------ reading


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key written twice, of which YAML would silently keep the last.

    Also an anchor within what it names: `deep_construct` makes each node whole before its parent.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        scalars = (key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in scalars:  # the base class refuses lists and mappings as keys
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML; ConfigError names `source`, line, column and problem."""
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply to be read") from None


def read_yaml(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the configuration file, a mapping; an empty file is an empty mapping."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    values = parse_yaml(text, str(file))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file}: holds {type(values).__name__} {values!r}; expected `key: value` lines"
        )
    return values


def parse_setting(text: str) -> tuple[str, Any]:
    """Read a flag `cache.block_size=32` as (path, value); the value is YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"{text!r}: expected path=value, such as cache.block_size=32")
    return path.strip(), parse_yaml(value, path)


def _from_environment(name: str, text: str) -> dict[str, Any]:
    path = name.removeprefix(ENV_PREFIX).lower().split("__")
    return _nest(path, parse_yaml(text, name))


def nest_keywords(arguments: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Put flat keywords and dotted paths in their sections; the same field twice is an error."""
    tree: dict[str, Any] = {}
    given: dict[TreePath, str] = {}
    for name, value in arguments:
        if name in REFUSED_KEYWORDS:
            raise ConfigError(f"{name}: not a setting (value {value!r}); {REFUSED_KEYWORDS[name]}")
        # Written out before they are merged: a short form would replace its section's options.
        branch = expand(_nest(FLAT_KEYWORDS.get(name, name).split("."), value), name)
        for path, _ in leaves(tag(branch, name)):
            if path in given:
                raise ConfigError(f"{'.'.join(path)}: given twice, as {given[path]} and as {name}")
            given[path] = name
        tree = merge(tree, branch)
    return tree


def _nest(path: Iterable[str], value: Any) -> dict[str, Any]:
    """`(a, b), 1` -> `{a: {b: 1}}`."""
    for key in reversed([*path]):
        value = {key: value}
    return dict(value)


# ------------------------------------------------------------------------------------ merging


def expand(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Write short forms out: `sjf` is `{name: sjf}`, and a backend one for both phases."""
    full = dict(values)
    if "attention" in full:
        try:
            full["attention"] = expand_attention(full["attention"])
        except ValueError as error:
            raise ConfigError(f"attention: {error} ({source})") from None
    for name in NAMED:
        if name in full:
            full[name] = expand_name(full[name], "name")
    return full


def tag(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Write short forms out, and note the source of every leaf."""
    return {key: _tag(value, source) for key, value in expand(values, source).items()}


def _tag(value: Any, source: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _tag(child, source) for key, child in value.items()}
    return Sourced(value, source)


def untag(tree: Any) -> Any:
    """The plain values of a tree of `Sourced` leaves."""
    if isinstance(tree, Mapping):
        return {key: untag(child) for key, child in tree.items()}
    return tree.value if isinstance(tree, Sourced) else tree


def leaves(tree: Mapping[str, Any], path: TreePath = ()) -> Iterator[tuple[TreePath, Sourced]]:
    """Every leaf with its path."""
    for key, child in tree.items():
        here = (*path, str(key))
        if isinstance(child, Mapping):
            yield from leaves(child, here)
        else:
            yield here, child


def merge(
    lower: Mapping[str, Any], upper: Mapping[str, Any], path: TreePath = ()
) -> dict[str, Any]:
    """Lay `upper` over `lower`, section by section."""
    name = CHOICES.get(path)
    if name and name in lower and name in upper and untag(lower[name]) != untag(upper[name]):
        return dict(upper)
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            if isinstance(below, Mapping):
                value = merge(below, value, (*path, key))
            elif "options" not in path:  # whose form is the plugin's affair
                _refuse_scalar(below, (*path, key))
        merged[key] = value
    return merged


def _refuse_scalar(below: Any, path: TreePath) -> None:
    """ConfigError where a key of a section would hide that the layer below has no section there."""
    value = untag(below)
    if value is not None:
        source = f" [{below.source}]" if isinstance(below, Sourced) else ""
        raise ConfigError(f"{'.'.join(path)}: {value!r} must be {EXPECTED['model_type']}{source}")
