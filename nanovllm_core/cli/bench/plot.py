"""`nanovllm bench plot`: draw result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def plot(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Result files of table, or of throughput with fixed lengths.", exists=True
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file, .svg or .png.")] = Path("bench.svg"),
) -> None:
    """Plot throughput, share of the roofline and GPU utilisation by batch size."""
    from nanovllm_core.bench.plots import draw, series_of

    draw(series_of([json.loads(file.read_text(encoding="utf-8")) for file in files]), out)
    typer.echo(f"wrote {out}")
