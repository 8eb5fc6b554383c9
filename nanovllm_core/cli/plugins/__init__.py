"""`nanovllm plugins`: what is installed, and what runs here."""

from __future__ import annotations

import typer

from nanovllm_core.cli.plugins import details, doctor, listing


def make_app() -> typer.Typer:
    """The core's commands; installed distributions add theirs (`nanovllm_core.cli.installed`)."""
    app = typer.Typer(
        no_args_is_help=True, help="List and check plugins; the kit tests and creates them."
    )
    # In the order of `nanovllm plugins --help`.
    app.command("list")(listing.list_plugins)
    app.command("show")(details.show)
    app.command("schema")(details.schema)
    app.command("doctor")(doctor.doctor)
    return app
