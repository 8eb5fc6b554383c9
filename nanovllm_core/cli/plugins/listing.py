"""`nanovllm plugins list`: what is installed, and what this machine can run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanovllm_core.cli.plugins.choice import AsJson, installed_plugins, requirements_here
from nanovllm_core.diagnostics.status import PluginStatus, plugin_statuses
from nanovllm_core.registry.discovery import install_one
from nanovllm_core.registry.kinds import KINDS


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
    for kind in KINDS.values():
        if kind.is_needed and not manager.names(kind.name):
            console.print(f"No {kind.name} is installed: {install_one(kind.name)}", markup=False)


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
