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
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from nanovllm_core.config.choices import choice_models, expand_attention, expand_name
from nanovllm_core.config.errors import FLAT_KEYWORDS, SECTION, dotted, explain_config
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.yaml_reader import MAX_DEPTH, has_64_bits, is_text, parse_yaml, read_yaml
from nanovllm_core.errors import ConfigError, clip, shown

COMMAND_GROUP = "nanovllm.commands"
"""Commands of distributions; each is imported when it is called."""

TreePath = tuple[int | str, ...]
ENV_PREFIX = "NANOVLLM_"
FIELDS = EngineConfig.model_fields.keys()

REFUSED_KEYWORDS: Mapping[str, str] = {
    "eos": "drop it; every end-of-sequence id of the checkpoint's generation_config is honoured",
    "hf_config": "drop it; the checkpoint's config.json is read when the engine starts",
}
"""Keywords of nano-vllm that have no field here, and what to do instead."""

CHOICES: Mapping[TreePath, str] = {path: model.KEY for path, model in choice_models(EngineConfig)}
"""The paths at which a plugin is chosen, and the key that names it."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its place in the configuration; the name it was given under, and its source."""

    name: str
    path: TreePath
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the source of each value that is not a default, by dotted path.

    `sections` are the top-level sections of installed commands, such as `serve:`, by the command's
    name. Each command checks its own.
    """

    config: EngineConfig
    sources: Mapping[str, str]
    sections: Mapping[str, Any]


def load_config(
    model: str | os.PathLike[str] | None = None,
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
    model: str | os.PathLike[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | Iterable[Given] | None = None,
    env: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """As `load_config`, and tell where each value came from. `overrides` may be flags.

    `defaults` are a command's own, below every source.
    """
    if isinstance(overrides, Mapping):
        overrides = [argument(*one) for one in overrides.items()]
    arguments = [*(overrides or ())]
    if model is not None:
        arguments.append(argument("model", model))
    content = [] if file is None else [Given(str(file), (), read_yaml(file), str(file))]
    own = [Given(name, (name,), value, "default") for name, value in (defaults or {}).items()]
    tree: dict[str, Any] = {}
    layers = own, content, [*from_environment(env)], arguments
    for entries in layers:
        tree = merge(tree, layer(entries))
    commands = entry_points(group=COMMAND_GROUP).names if tree.keys() - FIELDS else set()
    sections = {name: plain(tree.pop(name)) for name in (tree.keys() - FIELDS) & commands}
    sources = {".".join(map(str, leaf.path)): leaf.source for leaf in leaves(tree)}
    try:
        config = EngineConfig.model_validate(plain(tree))
    except ValidationError as error:
        where = {} if file is None else {"model": str(file)}
        for given in (one for entries in layers for one in entries):
            where |= dict.fromkeys(empty_sections(given.value, given.path), given.source)
        where |= sources
        raise ConfigError(explain_config(error, where, commands)) from None
    return LoadedConfig(config, sources, sections)


# ------------------------------------------------------------------------------------ reading


def parse_flags(texts: Iterable[str] = (), **fields: Any) -> list[Given]:
    """Read `--set cache.block_size=32`, whose values are YAML, and fields of flags of their own."""
    settings = []
    for text in texts:
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(f"{shown(text)}: expected path=value, such as cache.block_size=32")
        flag = f"--set {path}"
        settings.append(argument(path, parse_yaml(value, flag), flag))
    flags = ((f"--{name.replace('_', '-')}", name, value) for name, value in fields.items())
    return settings + [
        argument(name, value, flag) for flag, name, value in flags if value is not None
    ]


def from_environment(env: Mapping[str, str]) -> Iterator[Given]:
    """The variables that are settings, in the order of their names; values are YAML."""
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            yield Given(name, tuple(path), parse_yaml(env[name], name), name)


def argument(name: str, value: Any, flag: str = "") -> Given:
    """A field, a dotted path or a flat keyword of nano-vllm's; and the flag that gave it."""
    if not isinstance(name, str):
        raise ConfigError(f"the argument {shown(name)} must be text: the name of a field")
    if name in REFUSED_KEYWORDS:
        raise ConfigError(f"{name}: not a setting (value {shown(value)}); {REFUSED_KEYWORDS[name]}")
    path = tuple(FLAT_KEYWORDS.get(name, name).split("."))
    return Given(flag or name, path, value, "argument")


# ------------------------------------------------------------------------------------ merging


def layer(entries: Iterable[Given]) -> dict[str, Any]:
    """The tree of one layer, whose leaves are `Given`; the same field twice is an error."""
    tree: dict[str, Any] = {}
    seen: dict[TreePath, Given] = {}
    for given in entries:
        branch = _branch(given)
        # An empty section has no leaves, and is given all the same.
        for one in (given, *(leaf for leaf in leaves(branch) if leaf.path != given.path)):
            if first := seen.get(one.path):
                raise ConfigError(
                    f"{dotted(one.path)}: given twice, {shown(first.value)} by {clip(first.name)} "
                    f"and {shown(one.value)} by {clip(one.name)}; give it once"
                )
            seen[one.path] = one
        tree = merge(tree, branch)
    return tree


def _branch(given: Given) -> dict[str, Any]:
    """A value in its sections, with short forms written out: else one would replace its options."""
    values = given.value
    for key in reversed(given.path):
        values = {key: values}
    for path, problem in _problems(values, ()):
        where = f"{dotted(path)}: " if path else ""
        raise ConfigError(f"{where}{problem} [{clip(given.source)}]")
    return {key: _leaf(value, given, (key,)) for key, value in values.items()}


def _problems(value: object, path: TreePath) -> Iterator[tuple[TreePath, str]]:
    """What no YAML could say: values that hold themselves, other keys, huge numbers.

    Other objects are left to pydantic; so are iterators, which can be read only once.
    """
    if len(path) > MAX_DEPTH:
        yield path, f"nested too deeply, beyond {MAX_DEPTH} levels"
    elif isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                yield path, f"the key {shown(key)} must be text; put it in quotes"
            yield from _problems(key, path)
            yield from _problems(child, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from _problems(child, (*path, index))
    elif isinstance(value, int) and not has_64_bits(value):
        yield path, f"{shown(value)} does not fit in 64 bits; write a smaller number"
    elif isinstance(value, str) and not is_text(value):
        yield path, f"{shown(value)} has half of a surrogate pair; write the whole character"


def _leaf(value: Any, given: Given, path: TreePath) -> Any:
    """The value as a leaf, or a mapping of leaves."""
    if path == ("attention",):
        value = expand_attention(value)
    elif path in CHOICES:
        value = expand_name(value, CHOICES[path])
    if isinstance(value, Mapping):
        return {key: _leaf(child, given, (*path, str(key))) for key, child in value.items()}
    return replace(given, path=path, value=value)


def plain(tree: Any) -> Any:
    """The values of a tree or a leaf, without who gave them; None where there is neither."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return tree and tree.value


def leaves(tree: Mapping[str, Any]) -> Iterator[Given]:
    """Every leaf of a tree."""
    for child in tree.values():
        if isinstance(child, dict):
            yield from leaves(child)
        else:
            yield child


def empty_sections(value: Any, path: TreePath) -> Iterator[str]:
    """The dotted paths of sections without keys: they have no leaf that knows its source."""
    if isinstance(value, Mapping):
        if not value:
            yield ".".join(map(str, path))
        for key, child in value.items():
            yield from empty_sections(child, (*path, key))


def merge(lower: dict[str, Any], upper: Mapping[str, Any], path: TreePath = ()) -> dict[str, Any]:
    """Lay `upper` over `lower`, section by section, and return it; `lower` is changed.

    A key of a section does not hide that the layer below has another value in the section's place;
    that is a ConfigError. But an option may take any form.
    """
    name = CHOICES.get(path)
    if name and name in lower and name in upper and plain(lower[name]) != plain(upper[name]):
        return dict(upper)
    for key, value in upper.items():
        below: Any = lower.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            value = merge(below, value, (*path, key))
        elif isinstance(value, dict) and "options" not in path and plain(below) is not None:
            where = dotted((*path, key))
            raise ConfigError(
                f"{where}: {shown(below.value)} must be {SECTION} [{clip(below.source)}]"
            )
        lower[key] = value
    return lower
