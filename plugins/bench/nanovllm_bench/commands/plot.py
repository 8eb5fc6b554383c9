"""`nanovllm bench plot`: draw result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanovllm_bench.commands.out import writable


def _image(file: Path) -> Path:
    if file.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{file} must end in .svg or .png")
    writable(file)
    return file


def plot(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Result files of table, or of throughput with fixed lengths.",
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file, .svg or .png.", callback=_image)] = Path(
        "bench.svg"
    ),
) -> None:
    """Plot throughput, share of the roofline and GPU utilisation by batch size."""
    from nanovllm_bench.plots import draw, read_record, series_of

    draw(series_of([read_record(file) for file in files]), out)
    typer.echo(f"wrote {out}")
