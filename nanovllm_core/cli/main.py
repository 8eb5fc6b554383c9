"""The command `nanovllm`.

Each command lives in its own file and imports what is heavy when it runs, so `--help` is quick.
"""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, TextIO, cast

import typer

from nanovllm_core import __version__
from nanovllm_core.cli import chat, config, explain, generate, plugins
from nanovllm_core.cli.installed import add_extensions, add_installed_commands
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.registry.discovery import COMMAND_PARENTS

DOCTOR = ["plugins", "doctor"]


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command with all its parts; extensions that the environment enables add theirs.

    `arguments` are the command line's. One of those extensions that fails stops every command but
    the doctor, which needs none of them and reports it.
    """
    app = typer.Typer(
        name="nanovllm",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Every command below inherits it, those of extensions too.
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    app.command("generate")(generate.generate)
    app.command("chat")(chat.chat)
    app.command("explain")(explain.explain)
    about = typer.Typer(
        no_args_is_help=True, help="List and check plugins; the kit tests and creates them."
    )
    about.command("list")(plugins.list_plugins)
    about.command("show")(plugins.show)
    about.command("schema")(plugins.schema)
    about.command("doctor")(plugins.doctor)
    app.add_typer(about, name="plugins")
    app.add_typer(config.app, name="config")
    add_installed_commands(dict(zip(COMMAND_PARENTS, (app, about), strict=True)))
    if list(arguments[:2]) != DOCTOR:
        add_extensions(app)
    return app


def _common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda wanted: _show_version() if wanted else None,
            help="Print the versions of nanovllm, Python and torch.",
        ),
    ] = False,
) -> None:
    """A small LLM inference engine whose parts are plugins."""


def _show_version() -> None:
    torch = metadata.version("torch")  # of its metadata, as importing it takes a second
    print(f"nanovllm {__version__}, Python {platform.python_version()}, torch {torch}")
    raise typer.Exit


def main() -> None:
    """Run the command; an error of ours, or of a file, is one message and exit status 1."""
    prepare_streams()
    try:
        try:
            make_app(sys.argv[1:])()
        finally:
            sys.stdout.flush()  # so that a full disk is told here, not as Python ends
    except NanoVLLMError as error:
        sys.exit(f"error: {error}")
    except (OSError, UnicodeError) as error:
        # What could not be written is dropped: Python would try again at exit, and complain.
        sys.stdout = _nothing("w")
        # A pipe is broken as of `| head`, which has read enough.
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: {error}")


def prepare_streams() -> None:
    """Replace what cannot be read or written as text by a mark; a closed stream is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nothing(mode))
        elif isinstance(stream, io.TextIOWrapper) and name != "stderr":  # which escapes already
            stream.reconfigure(errors="replace")


def _nothing(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode, encoding="utf-8"))
