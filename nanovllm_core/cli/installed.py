"""Commands of installed distributions: known from metadata, imported when they are called.

An entry point in the group `nanovllm.commands` is one command. Its name is the command's path with
dots (`bench`, `plugins.test`); its target is a `typer.Typer`, or a function that typer can make a
command of. No setting enables it, and a broken one stops only itself.

Extensions add commands too: those that the environment enables, for no file is read yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

from nanovllm_core.config.sources import ENV_PREFIX, load_config
from nanovllm_core.errors import (
    NanoVLLMError,
    PluginConflictError,
    PluginFailedError,
    PluginLoadError,
    PluginNotFoundError,
)
from nanovllm_core.registry.discovery import COMMAND_GROUP, extra_command
from nanovllm_core.registry.manager import get_plugin_manager

KNOWN_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("bench", "eval", "plan"), "bench"),
    **dict.fromkeys(("serve", "serve-key"), "server"),
    **dict.fromkeys(("plugins.new", "plugins.test", "plugins.validate"), "kit"),
}
"""Commands of this project's own distributions, and the extra that installs each."""

COMPLETION_OPTIONS = frozenset({"install_completion", "show_completion"})
"""That typer adds to an application, by the names of their parameters."""
VARIABLE = f"{ENV_PREFIX}PLUGINS__ENABLE"
"""The variable that enables extensions."""


class ForwardingCommand(TyperCommand):
    """A command that keeps its arguments, `--help` and `--` included, for another to parse."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Nothing is parsed here."""
        ctx.args = [*args]
        return []


def add_installed_commands(groups: Mapping[str, typer.Typer]) -> None:
    """Add each installed command to its group; `groups` are by path, "" is the command itself.

    A command of ours that is not installed is there too, hidden, and names its pip line. No
    distribution may replace a command of the core.
    """
    own = {
        parent: {command.name for command in app.registered_commands}
        | {group.name for group in app.registered_groups}
        for parent, app in groups.items()
    }
    entries = entry_points(group=COMMAND_GROUP)
    for path in sorted({*entries.names, *KNOWN_COMMANDS}):
        parent, _, name = path.rpartition(".")
        if parent in groups and name not in own[parent]:
            _add(groups[parent], path, name, [*entries.select(name=path)])


def _add(app: typer.Typer, path: str, name: str, entries: Sequence[EntryPoint]) -> None:
    def forward(ctx: typer.Context) -> None:
        command = load_command(path, entries)
        command.main(ctx.args, prog_name=ctx.command_path, help_option_names=ctx.help_option_names)

    app.command(
        name, cls=ForwardingCommand, help=_about(entries), add_help_option=False, hidden=not entries
    )(forward)


def _about(entries: Sequence[EntryPoint]) -> str:
    """The owners of a command, and the summary in the metadata of one that owns it alone."""
    if not entries:
        return "Not installed."
    distribution = entries[0].dist if len(entries) == 1 else None
    summary = distribution and distribution.metadata.json.get("summary")
    return f"From {' and '.join(map(_owner, entries))}{f': {summary}' if summary else ''}."


def load_command(path: str, entries: Sequence[EntryPoint]) -> Any:
    """The click command of a path. `entries` are all that claim it.

    Raises PluginNotFoundError for none, PluginConflictError for several, and PluginLoadError where
    importing it fails.
    """
    words = f"nanovllm {path.replace('.', ' ')}"
    if not entries:
        raise PluginNotFoundError(
            f"{words} is not installed: {extra_command(KNOWN_COMMANDS[path])}"
        )
    if len(entries) > 1:
        owners = " and ".join(map(_owner, entries))
        raise PluginConflictError(f"{words} is registered by {owners}; uninstall one of them")
    [entry] = entries
    try:
        target = entry.load()
        if not isinstance(target, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command()(target)
            target = app
        command = typer.main.get_command(target)
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{words} of {_owner(entry)} cannot be imported from {entry.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    # Of the shell's completion there is one script, that of `nanovllm`.
    command.params = [one for one in command.params if one.name not in COMPLETION_OPTIONS]
    return command


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def add_extensions(app: typer.Typer) -> None:
    """Let each extension that `VARIABLE` names add its commands to `app`.

    Raises what the plugin manager raises, and PluginFailedError where adding them fails.
    """
    # A command may need no model, so one is made up to be able to read the rest.
    chosen = load_config("none").plugins
    if chosen.enable:
        manager = get_plugin_manager(disable=chosen.disable)
        manager.enable(chosen.enable)
        try:
            manager.hook.nanovllm_cli(app=app)
        except NanoVLLMError:
            raise
        except Exception as error:
            raise PluginFailedError(
                f"nanovllm_cli of one of the extensions {', '.join(chosen.enable)} failed: "
                f"{type(error).__name__}: {error}; take it out of {VARIABLE}"
            ) from error
