"""The flags that every command with an engine shares, and the engine they ask for."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_core.config.errors import FLAT_KEYWORDS
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import LoadedConfig, load_with_sources, parse_flags

if TYPE_CHECKING:
    from nanovllm_core.frontend.llm import LLM

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Folder, checkpoint plugin or hub id.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML configuration file.")]
FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A YAML configuration file; also as --config."),
]
Attention = Annotated[
    str | None, typer.Option(help="Attention backend, or PREFILL+DECODE (flash+triton).")
]
Scheduler = Annotated[
    str | None, typer.Option(help="Which request is served first: fcfs, sjf, ...")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16, bfloat16 or auto.")]


def json_object(text: str) -> dict[str, Any]:
    """The object that a flag's JSON holds, or a usage error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text!r:.80} is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{text!r:.80} is no JSON object such as {{"key": true}}')
    return value


GenerationConfig = Annotated[
    str | None,
    typer.Option(
        metavar="checkpoint|none",
        help="Where sampling flags that are left out come from: the checkpoint's own defaults "
        "(generation_config.json), or none.",
    ),
]
ChatTemplateKwargs = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=json_object,
        metavar="JSON",
        help='Variables for the chat template, as in {"enable_thinking": false}.',
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any other field, as path=value (repeatable).")
]


def one_file(argument: Path | None, option: Path | None) -> Path | None:
    """The file of a command that takes it by place and as `--config`; a usage error for both."""
    if argument is not None and option is not None:
        raise typer.BadParameter(f"two files are named, {argument} and {option}; leave one out")
    return argument or option


FLAGS = (EngineConfig.model_fields.keys() | FLAT_KEYWORDS.keys()) - {"seed"}
"""The flags of commands that are fields of the configuration; `--seed` is that of a request."""


def loaded_config(
    ctx: typer.Context, *, defaults: Mapping[str, Any] | None = None, **changed: Any
) -> LoadedConfig:
    """The configuration that a command's flags give on top of the file and the environment.

    `--attention` may be a pair of prefill and decode, `flash+triton`. `changed` stand in the place
    of flags, and take what a file may say. `defaults` stand where no source says otherwise.
    """
    params = ctx.params | changed
    attention = params.get("attention")
    if isinstance(attention, str) and "+" in attention:
        params["attention"] = dict(zip(("prefill", "decode"), attention.split("+", 1), strict=True))
    fields = {name: value for name, value in params.items() if name in FLAGS}
    flags = parse_flags(params["settings"] or (), **fields)
    return load_with_sources(file=params["config"], overrides=flags, defaults=defaults)


def open_llm(config: EngineConfig) -> LLM:
    """Start an engine and show its choices; what is heavy is imported only now."""
    from nanovllm_core.frontend.llm import LLM

    show_choices()
    return LLM.from_config(config)


def show_choices() -> None:
    """On a terminal, log the choices of a start: what `auto` took, and why the others lost."""
    if sys.stderr.isatty():
        logging.basicConfig(format="%(message)s")
        logging.getLogger("nanovllm_core").setLevel(logging.INFO)
