"""`nanovllm bench table`: backends by batch and length."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.shared import (
    LoadFormat,
    MaxModelLen,
    Temperature,
    above_zero,
    engine_rows,
    names_of,
    numbers,
    wide_console,
)
from nanovllm_core.cli import engine_options as options


def table(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    attention: Annotated[
        str, typer.Option(help="Comma-separated backends; NAME.VALUE sets an option: sdpa.math.")
    ] = "flash,triton,sdpa.math",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16,32,64",
    lengths: Annotated[str, typer.Option(help="Prompt tokens; outputs are as long.")] = (
        "512,1024,2048"
    ),
    runs: Annotated[int, typer.Option(help="Measured runs per cell.", min=1)] = 1,
    max_seconds: Annotated[
        float,
        typer.Option(help="Skip cells whose run would take longer (seconds).", callback=above_zero),
    ] = 60.0,
    load_format: LoadFormat = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = 0.6,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    out: Out = None,
) -> None:
    """Output tokens per second by backend, batch and length; outputs as long as prompts."""
    from nanovllm_bench.record import write_record
    from nanovllm_bench.table import TableCells, measure_table

    cells = TableCells(
        backends=names_of(attention, "--attention"),
        batches=numbers(batch, "--batch"),
        lengths=numbers(lengths, "--lengths"),
        runs=runs,
        max_seconds=max_seconds,
        temperature=temperature,
    )
    rows = f"limits.max_num_seqs={max(cells.batches)}"

    def make_config(choice: Any) -> Any:
        return options.loaded_config(
            ctx, attention=choice, settings=[rows, *(settings or [])]
        ).config

    def on_cell(text: str, record: dict[str, Any]) -> None:
        typer.echo(text, err=True)
        if out is not None:
            write_record(out, record)

    result = measure_table(make_config, cells, on_cell)
    if out is not None:  # with the shares of the roofline
        write_record(out, result)
    _show(result, cells.backends)


def _show(result: dict[str, Any], backends: Any) -> None:
    console = wide_console()
    for name, engine in result["engines"].items():
        rows = engine_rows(engine)
        console.print(f"{name}: {rows['attention']}, CUDA graphs {rows['CUDA graphs']}")
    if result["engines"]:
        console.print(f"{rows['device']}; {rows['versions']}; {rows['commit']}")
    shown = Table("batch", "length", *backends, "winner", "speed-up", "share of roofline")
    for cell in result["cells"]:
        winner = cell["winner"]
        results = [cell["backends"][name]["result"] for name in backends]
        share = cell["backends"][winner]["roofline"]["share"] if winner else None
        shown.add_row(
            str(cell["batch"]),
            str(cell["length"]),
            *(f"{value:,.0f}" if isinstance(value, float) else value for value in results),
            winner or "–",
            f"{cell['speed_up']:.2f}" if cell["speed_up"] else "–",
            f"{100 * share:.0f} %" if share is not None else "–",
        )
    console.print(shown)
