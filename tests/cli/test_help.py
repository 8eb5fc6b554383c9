"""Help: `-h` and `--help` on every command, those of extensions too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from nanovllm_core.cli.installed import ForwardingCommand, load_command
from nanovllm_core.cli.main import make_app
from nanovllm_core.registry import COMMAND_GROUP

EXTENSION = """
import typer
from typing import Annotated
from nanovllm_core.api import hookimpl

def greet(host: Annotated[str, typer.Option("-h")] = "all"):
    print("Hello", host)

def wave():
    \"\"\"Wave.\"\"\"

@hookimpl
def nanovllm_cli(app):
    group = typer.Typer()
    group.command()(greet)
    group.command()(wave)
    app.add_typer(group, name="greeter")
"""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that name every command of a tree, those of installed distributions too."""
    if isinstance(command, ForwardingCommand):
        name = ".".join(path)
        entries = [*entry_points(group=COMMAND_GROUP, name=name)]
        if entries:
            yield from commands(load_command(name, entries), path)
        return
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def test_every_command_answers_to_h_as_to_help(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that has another use for -h keeps it."""
    install(
        "greeter",
        {"nanovllm.extensions": {"greeter": "greeter_plugin"}},
        {"greeter_plugin": EXTENSION},
    )
    monkeypatch.setenv("NANOVLLM_PLUGINS__ENABLE", "[greeter]")
    app = make_app()
    found = [*commands(typer.main.get_command(app))]
    assert {(), ("generate",), ("bench", "table"), ("plugins", "new"), ("greeter", "wave")} <= {
        *found
    }
    for path in found:
        if path == ("greeter", "greet"):
            continue
        short = CliRunner().invoke(app, [*path, "-h"])
        assert short.exit_code == 0, path
        assert "Usage: " in short.output
        assert "--help" in short.output
    taken = CliRunner().invoke(app, ["greeter", "greet", "-h", "one"])
    assert (taken.exit_code, taken.output) == (0, "Hello one\n")
    assert CliRunner().invoke(app, ["greeter", "greet", "--help"]).exit_code == 0
