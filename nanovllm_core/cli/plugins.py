"""`nanovllm plugins`: what is installed, what runs here, what is wrong, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nanovllm_core.cli.installed import VARIABLE, add_extensions
from nanovllm_core.config.sources import load_config
from nanovllm_core.diagnostics.details import plugin_details
from nanovllm_core.diagnostics.doctor import examine, next_steps
from nanovllm_core.diagnostics.status import (
    PluginStatus,
    plugin_status,
    plugin_statuses,
    requirements_here,
)
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginNotFoundError,
    did_you_mean,
    shown,
)
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.registry.discovery import InstalledPlugin
from nanovllm_core.registry.kinds import KINDS, NO_SPEC
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.selection.fit import get_one

Name = Annotated[str, typer.Argument(help="Name of the plugin.")]
KindOption = Annotated[
    str | None, typer.Option("--kind", help="Its kind, if several have that name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# --------------------------------------------------------------------------------- the commands


def list_plugins(as_json: AsJson = False) -> None:
    """List the installed plugins, and whether this machine can run them.

    Plugins are judged by what they declare and by whether their code exists. It is not imported:
    what fails on import shows in `nanovllm plugins doctor` and `test`.

    Attention backends are checked for grouped heads of size 128 on this device, in bfloat16 on a
    GPU and float32 on a CPU.
    """
    manager = installed_plugins()
    statuses = plugin_statuses(manager, requirements_here())
    if as_json:
        print(json.dumps([status.to_json() for status in statuses], indent=2))
        return
    console = Console()
    # Narrower than this, the reasons become a column of single words.
    console.width = max(console.width, 120)
    console.print(_table(statuses))
    for name, kind in KINDS.items():
        if kind.is_needed and not manager.names(name):
            console.print(f"No {name} can be selected: {get_one(manager, name)}", markup=False)


def show(name: Name, kind: KindOption = None, as_json: AsJson = False) -> None:
    """Show what a plugin is, where it is defined, what it can do and whether it runs here.

    Attention backends are checked for grouped heads of size 128 on this device, in bfloat16 on a
    GPU and float32 on a CPU.
    """
    manager = installed_plugins()
    plugin = one_plugin(manager, name, kind)
    status = plugin_status(manager, plugin, requirements_here())
    details = plugin_details(manager, status)
    if as_json:
        print(json.dumps(details, indent=2))
    else:
        print("\n".join(_lines(details)))


def schema(name: Name, kind: KindOption = None) -> None:
    """Print the JSON Schema of a plugin's options."""
    manager = installed_plugins()
    plugin = one_plugin(manager, name, kind)
    if plugin.kind in NO_SPEC:
        raise ConfigError(
            f"{plugin.kind} {shown(name)} states no options: an extension reads what stands under "
            "plugins.options itself, and a kind has none"
        )
    options = manager.spec(plugin.kind, plugin.name).options
    print(json.dumps(options.model_json_schema(), indent=2))


def doctor(as_json: AsJson = False) -> None:
    """Check Python, torch, GPUs and every plugin; say what to do next.

    Exit status 1 if something prevents generation.
    """
    checks = examine()
    try:
        add_extensions(typer.Typer())
    except Exception as error:  # whatever it is, the doctor goes on
        detail = f"no other command can start: {type(error).__name__}: {error}"
        remedy = f"mend what {VARIABLE} names, or take it out of there"
        checks.append(DoctorCheck("plugins.enable", False, detail, remedy, fatal=True))
    steps = next_steps(checks)
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "next": steps}, indent=2))
    else:
        console = Console(soft_wrap=True)
        for check in checks:
            console.print(line(check))
        console.print("\nWhat to do next:")
        for number, step in enumerate(steps, 1):
            console.print(Text(f"  {number}. {step}"))
    if any(check.fatal and not check.ok for check in checks):
        raise typer.Exit(1)


# --------------------------------------------------------------------------- finding and printing


def installed_plugins() -> PluginManager:
    """The installed plugins, without those that the environment's `plugins.disable` names."""
    # The commands need no model, so one is made up to be able to read the rest.
    return get_plugin_manager(disable=load_config("none").plugins.disable)


def one_plugin(manager: PluginManager, name: str, kind: str | None) -> InstalledPlugin:
    """The installed plugin of that name; PluginNotFoundError or PluginConflictError if not one."""
    if kind is not None:
        return manager.find(kind, name)
    installed = manager.installed()
    kinds = sorted({plugin.kind for plugin in installed if plugin.name == name})
    # Asking for a disabled one says how it got so.
    kinds = kinds or sorted({plugin.kind for plugin in manager.disabled() if plugin.name == name})
    if not kinds:
        names = sorted({plugin.name for plugin in installed})
        hint = manager.misplaced(name) or did_you_mean(name, names)
        raise PluginNotFoundError(
            f"no plugin {shown(name)} is installed{hint}; installed: {', '.join(names) or 'none'}"
        )
    if len(kinds) > 1:
        raise PluginConflictError(
            f"{shown(name)} is the name of several plugins; say which with --kind "
            f"{' or '.join(kinds)}"
        )
    return manager.find(kinds[0], name)


def line(check: DoctorCheck) -> Text:
    """`ok    torch: 2.13.0`; a check that is not ok says how bad it is."""
    word, colour = "ok", "green"
    if not check.ok:
        word, colour = ("wrong", "yellow") if check.remedy else ("-", "dim")
    if check.fatal and not check.ok:
        word, colour = "stops", "red"
    return Text.assemble((f"{word:<7}", colour), (check.name, "bold"), f": {check.detail}")


def _table(statuses: Sequence[PluginStatus]) -> Table:
    colours = {"ready": "green", "unsupported": "yellow", "broken": "red", "disabled": "dim"}
    table = Table(title="Installed plugins", title_justify="left")
    for column in ("kind", "name", "distribution", "version", "runs here"):
        table.add_column(column, overflow="fold")
    for status in statuses:
        plugin = status.plugin
        text = "yes" if status.state == "ready" else f"no, {status.state}"
        details = "; ".join(status.reasons) or status.note
        table.add_row(
            *map(escape, (plugin.kind, plugin.name, plugin.distribution, plugin.version)),
            f"[{colours[status.state]}]{text}[/]" + (f": {escape(details)}" if details else ""),
        )
    return table


def _lines(details: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """`key: value` lines; what an option is stands on a line of its own."""
    for key, value in details.items():
        if key == "options":
            yield f"{indent}options:" + ("" if value else " none")
            for option in value:
                yield f"{indent}  {option['name']}: {option['type']} = {option['default']}"
                if option["description"]:
                    yield f"{indent}      {option['description']}"
        elif isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, list):
            yield f"{indent}{key}: {', '.join(map(str, value)) or 'none'}"
        elif isinstance(value, bool):
            yield f"{indent}{key}: {'yes' if value else 'no'}"
        else:
            yield f"{indent}{key}: {'any' if value is None else value}"
