"""`nanovllm plugins`: what is installed, what runs here, and how to write one more."""

from __future__ import annotations

import typer

from nanovllm_core.cli.plugins import conformance, details, doctor, listing, new, validate

app = typer.Typer(no_args_is_help=True, help="List, check, test and create plugins.")

# In the order of `nanovllm plugins --help`.
app.command("list")(listing.list_plugins)
app.command()(details.show)
app.command()(details.schema)
app.command()(doctor.doctor)
app.command()(validate.validate)
app.command("test")(conformance.run_conformance_suite)
app.command()(new.new)
