"""The sources of the configuration, and their precedence.

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
from typing import Any

from pydantic import ValidationError

from nanovllm_core.config.choices import choice_models, expand_attention, expand_name
from nanovllm_core.config.errors import EXPECTED, FLAT_KEYWORDS, dotted, explain_config
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.yaml_reader import (
    MAX_DEPTH,
    has_64_bits,
    is_unicode,
    parse_yaml,
    read_yaml,
)
from nanovllm_core.errors import ConfigError, clip, shown

TreePath = tuple[int | str, ...]
ENV_PREFIX = "NANOVLLM_"

REFUSED_KEYWORDS: Mapping[str, str] = {
    "eos": "drop it; every end-of-sequence id of the checkpoint's generation_config is honoured",
    "hf_config": "drop it; the checkpoint's config.json is read when the engine starts",
}
"""Keywords of nano-vllm that have no field here, and what to do instead."""

CHOICES: Mapping[TreePath, str] = {path: model.KEY for path, model in choice_models(EngineConfig)}
"""The paths at which a plugin is chosen, and the key that names it."""

NAMED = tuple(path[0] for path, model in choice_models(EngineConfig) if model.KEY == "name")
"""Sections for which the name alone will do."""


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
    tree = merge(tree, layer(from_environment(env)))
    tree = merge(tree, layer(from_arguments(arguments)))
    sources = {".".join(map(str, path)): leaf.source for path, leaf in leaves(tree)}
    try:
        config = EngineConfig.model_validate(untag(tree))
    except ValidationError as error:
        named = None if file is None else str(file)
        raise ConfigError(explain_config(error, sources, named)) from None
    return LoadedConfig(config, sources)


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class Given:
    """One value of a layer: the name that it was given under, and where it belongs."""

    name: str
    path: TreePath
    value: Any
    source: str


def parse_setting(text: str) -> tuple[str, Any]:
    """Read a flag `cache.block_size=32` as (path, value); the value is YAML."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"{shown(text)}: expected path=value, such as cache.block_size=32")
    return path, parse_yaml(value, f"--set {path}")


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Read several; ConfigError for a path that is given twice."""
    values: dict[str, Any] = {}
    for path, value in map(parse_setting, texts):
        if path in values:
            raise ConfigError(
                f"--set {clip(path)} is given twice, as {shown(values[path])} and as "
                f"{shown(value)}; give it once"
            )
        values[path] = value
    return values


def from_environment(env: Mapping[str, str]) -> Iterator[Given]:
    """The variables that are settings, in the order of their names; values are YAML."""
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            yield Given(name, tuple(path), parse_yaml(env[name], name), name)


def from_arguments(arguments: Iterable[tuple[str, Any]]) -> Iterator[Given]:
    """Fields, dotted paths and nano-vllm's flat keywords."""
    for name, value in arguments:
        if not isinstance(name, str):
            raise ConfigError(f"the argument {shown(name)} must be text: the name of a field")
        if name in REFUSED_KEYWORDS:
            raise ConfigError(
                f"{name}: not a setting (value {shown(value)}); {REFUSED_KEYWORDS[name]}"
            )
        yield Given(name, tuple(FLAT_KEYWORDS.get(name, name).split(".")), value, "argument")


def layer(entries: Iterable[Given]) -> dict[str, Any]:
    """Put the values of one layer in their sections; the same field twice is an error."""
    tree: dict[str, Any] = {}
    names: dict[TreePath, str] = {}
    for given in entries:
        if len(given.path) > MAX_DEPTH:
            raise _too_deep(given.path, given.source)
        # Written out before they are merged: a short form would replace its section's options.
        branch = tag(_nest(given.path, given.value), given.source)
        for path, _ in leaves(branch):
            if path in names:
                raise ConfigError(
                    f"{dotted(path)}: given twice, as {clip(names[path])} and as "
                    f"{clip(given.name)}; give it once"
                )
            names[path] = given.name
        tree = merge(tree, branch)
    return tree


def _nest(path: Iterable[int | str], value: Any) -> dict[str, Any]:
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
    """Write short forms out, and note the source of every leaf.

    Raises ConfigError for what no text could say: values that hold themselves, huge numbers.
    """
    _check_keys(values, source, ())
    return {key: _tag(value, source, (key,)) for key, value in expand(values, source).items()}


def _tag(value: Any, source: str, path: TreePath) -> Any:
    if isinstance(value, Mapping):
        _check_keys(value, source, path)
        return {key: _tag(child, source, (*path, key)) for key, child in value.items()}
    _check_value(value, source, path)
    return Sourced(value, source)


def _check_value(value: object, source: str, path: TreePath) -> None:
    """Whether text could say it: what stands in a list has no source of its own."""
    if isinstance(value, Mapping):
        _check_keys(value, source, path)
        for key, child in value.items():
            _check_value(child, source, (*path, key))
    elif isinstance(value, list | tuple):
        if len(path) >= MAX_DEPTH:
            raise _too_deep(path, source)
        for index, child in enumerate(value):
            _check_value(child, source, (*path, index))
    elif isinstance(value, int) and not has_64_bits(value):
        raise ConfigError(
            f"{dotted(path)}: {shown(value)} is beyond 64 bits; write a smaller whole number "
            f"[{clip(source)}]"
        )
    elif isinstance(value, str) and not is_unicode(value):
        raise ConfigError(
            f"{dotted(path)}: {shown(value)} has half of a surrogate pair, which is no Unicode "
            f"text; write the whole character [{clip(source)}]"
        )


def _check_keys(value: Mapping[Any, Any], source: str, path: TreePath) -> None:
    if len(path) >= MAX_DEPTH:
        raise _too_deep(path, source)
    for key in value:
        is_text = isinstance(key, str) and is_unicode(key)
        is_number = isinstance(key, int) and not isinstance(key, bool) and has_64_bits(key)
        if not is_text and not is_number:
            raise ConfigError(
                f"{dotted(path)}: the key {shown(key)} must be text; put it in quotes "
                f"[{clip(source)}]".removeprefix(": ")
            )


def _too_deep(path: TreePath, source: str) -> ConfigError:
    return ConfigError(
        f"{dotted(path)}: nested too deeply; at most {MAX_DEPTH} levels are read [{clip(source)}]"
    )


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


def merge(lower: dict[str, Any], upper: Mapping[str, Any], path: TreePath = ()) -> dict[str, Any]:
    """Lay `upper` over `lower`, section by section, and return it; `lower` is changed."""
    name = CHOICES.get(path)
    if name and name in lower and name in upper and untag(lower[name]) != untag(upper[name]):
        return dict(upper)
    for key, value in upper.items():
        below = lower.get(key)
        if isinstance(value, Mapping):
            if isinstance(below, dict):
                value = merge(below, value, (*path, key))
            elif "options" not in path:  # whose form is the plugin's affair
                _refuse_scalar(below, (*path, key))
        lower[key] = value
    return lower


def _refuse_scalar(below: Any, path: TreePath) -> None:
    """ConfigError where a key of a section would hide that the layer below has no section there."""
    value = untag(below)
    if value is not None:
        source = f" [{clip(below.source)}]" if isinstance(below, Sourced) else ""
        raise ConfigError(
            f"{dotted(path)}: {shown(value)} must be {EXPECTED['model_type']}{source}"
        )
