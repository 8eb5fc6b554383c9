"""`nanovllm config`: the schema of the file, what is in effect, and whether a file is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import typer

from nanovllm_core.cli.engine_options import ConfigFile, FileArgument, Model, Settings, one_file
from nanovllm_core.config.choices import plugins_named
from nanovllm_core.config.errors import MAX_ERRORS
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import load_with_sources, parse_flags
from nanovllm_core.config.yaml_reader import flow_yaml
from nanovllm_core.diagnostics.schema import config_schema
from nanovllm_core.errors import ConfigError, NanoVLLMError
from nanovllm_core.registry.kinds import KINDS
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.selection.decisions import BY_SIZE, Decisions, select_by_size

app = typer.Typer(no_args_is_help=True, help="Show and check the configuration.")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the file, with the options of the installed plugins."""
    print(json.dumps(config_schema(get_plugin_manager()), indent=2))


@app.command()
def show(
    file: FileArgument = None,
    config: ConfigFile = None,
    model: Model = None,
    settings: Settings = None,
) -> None:
    """Print the values in effect as YAML, and where each comes from."""
    path = one_file(file, config)
    flags = parse_flags(settings or (), model=model)
    loaded = load_with_sources(file=path, overrides=flags)
    for line in render(loaded.config.model_dump(), loaded.sources):
        print(line)
    for name in loaded.sections:
        print(f"# {name}: is left to nanovllm {name}")


@app.command()
def check(
    file: FileArgument = None,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Say OK, or what is wrong: keys, values, the model, plugins and their options.

    The device is left out, so that a file can be checked for another machine, and nothing is
    downloaded; `nanovllm explain` does the rest on this one.
    """
    path = one_file(file, config)
    if path is None:
        raise typer.BadParameter("name a file, as in: nanovllm config check engine.yaml")
    loaded = load_with_sources(model, file=path, env={})
    checked = loaded.config
    plugins = get_plugin_manager(disable=checked.plugins.disable)
    raise_all([partial(check_plugins, plugins, checked), partial(check_model, plugins, checked)])
    left = "".join(f"; {one}: is left to nanovllm {one}" for one in loaded.sections)
    print(f"{path}: OK{left}")


def check_model(manager: PluginManager, config: EngineConfig) -> None:
    """The checkpoint, its architecture and the longest sequence; raises what is wrong first.

    Only what lies on this machine is opened: for a reference, as to the hub, the source need only
    be installed.
    """
    decisions = Decisions(config, manager)
    if decisions.source.reference and decisions.source.plugin.name != "local":
        return
    _ = decisions.model
    if config.limits.max_model_len is not None:  # only that needs the model's code, and torch
        _ = decisions.max_model_len


def check_plugins(manager: PluginManager, config: EngineConfig) -> None:
    """Load what the configuration names, and check its options; raises all that is wrong."""
    checks: list[Callable[[], object]] = [
        partial(manager.resolve, kind.name, choice.plugin, choice.options, f"{path}.options")
        for kind in KINDS.values()
        if kind.choice
        for path, choice in plugins_named(getattr(config, kind.choice), kind.choice)
        if not choice.is_auto
    ]
    checks.append(partial(manager.enable, config.plugins.enable))
    checks += [partial(select_by_size, manager, config, kind) for kind in BY_SIZE]
    raise_all(checks)


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check, and raise one ConfigError with what each of those that fail says."""
    wrong: dict[str, None] = {}  # an executor that is not there fails two checks with one message
    for check_one in checks:
        try:
            check_one()
        except NanoVLLMError as error:
            wrong[str(error)] = None
        if len(wrong) == MAX_ERRORS:
            wrong["... and perhaps more: the rest was not checked"] = None
            break
    if wrong:
        raise ConfigError("\n".join(wrong))


def render(
    values: Mapping[str, Any], sources: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[str]:
    """YAML lines, each value with its source as a comment."""
    for key, value in values.items():
        here = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping) and value:
            yield f"{indent}{flow_yaml(key)}:"
            yield from render(value, sources, here, f"{indent}  ")
        else:
            yield f"{indent}{flow_yaml(key)}: {flow_yaml(value)}  # {sources.get(here, 'default')}"
