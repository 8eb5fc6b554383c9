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
            help="Result files of table, of throughput with fixed lengths, or of serve.",
            exists=True,
            dir_okay=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file, .svg or .png.", callback=_image)] = Path(
        "bench.svg"
    ),
) -> None:
    """Plot throughput, share of the roofline and GPU utilisation by batch size.

    Results of serve: throughput and p99s by clients or requests per second.
    """
    from nanovllm_bench.plots import draw, read_record, series_of
    from nanovllm_bench.serve.compare import draw_serving, is_serving, names_of

    records = [read_record(file) for file in files]
    if any(map(is_serving, records)):
        draw_serving(dict(zip(names_of(files), records, strict=True)), out)
    else:
        draw(series_of(records), out)
    typer.echo(f"wrote {out}")
