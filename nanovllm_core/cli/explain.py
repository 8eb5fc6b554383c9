"""`nanovllm explain`: what a configuration chooses at each seam, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nanovllm_core.cli.engine_options import (
    Attention,
    ConfigFile,
    Device,
    Dtype,
    FileArgument,
    Model,
    Scheduler,
    Settings,
    loaded_config,
    one_file,
)


def explain(
    file: FileArgument = None,
    config: ConfigFile = None,
    model: Model = None,
    attention: Attention = None,
    scheduler: Scheduler = None,
    device: Device = None,
    dtype: Dtype = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would run, and why not the alternatives; loads no weights.

    Exit status 1 if an engine would not start.
    """
    # It asks torch for devices, and plugins what they can do.
    from nanovllm_core.diagnostics.explain import Seam, explain as explain_config

    path = one_file(file, config)
    loaded = loaded_config(model, path, attention, scheduler, device, dtype, settings)
    seams = explain_config(loaded)

    def lines(seam: Seam) -> list[Text]:
        if seam.problem:
            return [Text.assemble((seam.name, "bold"), ": ", (seam.problem, "red"))]
        shown = [Text.assemble((seam.name, "bold"), f": {seam.chosen}")]
        shown.append(Text(f"    because  {seam.why}"))
        return shown + [Text(f"    not {name}: {why}", "dim") for name, why in seam.others.items()]

    if as_json:
        print(json.dumps([asdict(seam) for seam in seams], indent=2))
    else:
        console = Console(soft_wrap=True)
        for seam in seams:
            for line in lines(seam):
                console.print(line)
    if any(seam.problem for seam in seams):
        raise typer.Exit(1)
