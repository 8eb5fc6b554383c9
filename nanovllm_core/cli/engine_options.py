"""The flags that every command with an engine shares, and the engine they ask for."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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


def writable(file: Path | None) -> Path | None:
    """A file that can be written, or a usage error before the work whose result it is to hold."""
    if file is None:
        return None
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder; name a file in it")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written; name a file in a folder of yours")
    return file


Out = Annotated[
    Path | None, typer.Option(help="Write the result to this JSON file.", callback=writable)
]


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


def loaded_config(
    model: str | None,
    config: Path | None,
    attention: Any,
    scheduler: str | None,
    device: str | None,
    dtype: str | None,
    settings: list[str] | None,
    defaults: Mapping[str, Any] | None = None,
    **fields: Any,
) -> LoadedConfig:
    """The configuration that these flags give on top of the file and the environment.

    `attention` is the text of the flag, where `flash+triton` is a pair of prefill and decode, or
    what a file would say in its place. `fields` are further fields of `EngineConfig`; None where
    the flag was left out. `defaults` stand where no source says otherwise.
    """
    if isinstance(attention, str) and "+" in attention:
        attention = dict(zip(("prefill", "decode"), attention.split("+", 1), strict=True))
    fields |= {"attention": attention, "scheduler": scheduler, "device": device, "dtype": dtype}
    flags = parse_flags(settings or (), model=model, **fields)
    return load_with_sources(file=config, overrides=flags, defaults=defaults)


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
