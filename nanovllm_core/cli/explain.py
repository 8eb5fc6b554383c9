"""`nanovllm explain`: what a configuration chooses at each seam, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nanovllm_core.cli import engine_options as options


def explain(
    ctx: typer.Context,
    file: options.FileArgument = None,
    config: options.ConfigFile = None,
    model: options.Model = None,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would run, and why not the alternatives; loads no weights.

    Exit status 1 if an engine would not start.
    """
    # It asks torch for devices, and plugins what they can do.
    from nanovllm_core.diagnostics.explain import explain as explain_config

    loaded = options.loaded_config(ctx, config=options.one_file(file, config))
    seams = explain_config(loaded)
    if as_json:
        print(json.dumps([asdict(seam) for seam in seams], indent=2))
    else:
        console = Console(soft_wrap=True)
        for seam in seams:
            text = (seam.problem, "red") if seam.problem else seam.chosen
            console.print(Text.assemble((seam.name, "bold"), ": ", text))
            if seam.why:
                console.print(Text(f"    because  {seam.why}"))
            for name, why in seam.others.items():
                console.print(Text(f"    not {name}: {why}", "dim"))
    if problems := [seam.name for seam in seams if seam.problem]:
        typer.echo(f"An engine would not start: see {', '.join(problems)}.", err=True)
        raise typer.Exit(1)
