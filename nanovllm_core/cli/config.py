"""`nanovllm config`: the schema of the file, what is in effect, and whether a file is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from nanovllm_core.config import EngineConfig
from nanovllm_core.config_schema import config_schema
from nanovllm_core.config_sources import load_with_sources, parse_setting, read_yaml
from nanovllm_core.errors import ConfigError, NanoVLLMError
from nanovllm_core.plugin_manager import PluginManager, get_plugin_manager
from nanovllm_core.startup import check_tensor_parallel_size

app = typer.Typer(no_args_is_help=True, help="The configuration: schema, values, check.")

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A field, as path=value (repeat for more).")
]


@app.command()
def schema() -> None:
    """The JSON Schema of the file, with the options of the installed plugins."""
    print(json.dumps(config_schema(get_plugin_manager()), indent=2))


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="A YAML configuration file.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder, checkpoint plugin or hub id.")] = None,
    settings: Settings = None,
) -> None:
    """What is in effect, as YAML, and where each value comes from."""
    overrides = dict(map(parse_setting, settings or []))
    loaded = load_with_sources(model, file=file, overrides=overrides)
    for line in render(loaded.config.model_dump(mode="json"), loaded.sources):
        print(line)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A YAML configuration file.")]) -> None:
    """Say OK, or what is wrong: keys, values, plugins that are not installed, their options."""
    # The file may leave the model to the command line.
    model = None if "model" in read_yaml(file) else "demo"
    config = load_with_sources(model, file=file, env={}).config
    check_plugins(get_plugin_manager(disable=config.plugins.disable), config)
    print(f"{file}: OK")


def check_plugins(manager: PluginManager, config: EngineConfig) -> None:
    """Load what the configuration names, and check its options; raises all that is wrong."""
    attention = config.attention
    phases = {"attention.prefill": attention.prefill, "attention.decode": attention.decode}
    if attention.prefill == attention.decode:
        phases = {"attention": attention.prefill}
    checks: list[Callable[[], object]] = [
        partial(manager.resolve, kind, choice.name, choice.options, f"{kind}.options")
        for kind, choice in (
            ("scheduler", config.scheduler),
            ("executor", config.executor),
            ("sampler", config.sampler),
            ("kernels", config.kernels),
        )
        if (kind, choice.name) != ("kernels", "auto")
    ]
    checks += [
        partial(manager.resolve, "attention", choice.backend, choice.options, f"{path}.options")
        for path, choice in phases.items()
        if choice.backend != "auto"
    ]
    # One by one, so that a wrong one does not hide the next.
    checks += [
        partial(manager.resolve, kind, choice.name, choice.options, f"{path}[{index}].options")
        for kind, path, choices in (
            ("logits_processor", "logits_processors", config.logits_processors),
            ("observer", "observers", config.observers),
        )
        for index, choice in enumerate(choices)
    ]
    checks.append(partial(manager.enable, config.plugins.enable))
    checks.append(partial(check_tensor_parallel_size, manager, config))
    wrong: list[str] = []
    for check_one in checks:
        try:
            check_one()
        except NanoVLLMError as error:
            wrong.append(str(error))
    if wrong:
        # An executor that is not there fails two checks with one message.
        raise ConfigError("\n".join(dict.fromkeys(wrong)))


def render(
    values: Mapping[str, Any], sources: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[str]:
    """YAML lines, each value with its source as a comment."""
    for key, value in values.items():
        here = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from render(value, sources, here, f"{indent}  ")
        else:
            pair = yaml.safe_dump(
                {key: value}, default_flow_style=True, width=10**6, sort_keys=False
            )
            yield f"{indent}{pair.strip()[1:-1]}  # {sources.get(here, 'default')}"
