"""`nanovllm bench compare`: against another library, on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.serve import milliseconds
from nanovllm_bench.commands.shared import (
    LoadFormat,
    MaxModelLen,
    NumSeqs,
    Runs,
    engine_rows,
    percent,
    rates,
    show_rows,
    wide_console,
)
from nanovllm_core.cli import engine_options as options


def compare(
    ctx: typer.Context,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Result files of serve to compare, instead of measuring.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    model: options.Model = None,
    config: options.ConfigFile = None,
    against: Annotated[Literal["hf"], typer.Option(help="hf: transformers' generate.")] = "hf",
    num_seqs: NumSeqs = 16,
    shortest: Annotated[int, typer.Option(help="Minimum tokens of prompt and output.", min=1)] = 16,
    longest: Annotated[int, typer.Option(help="Maximum tokens of prompt and output.", min=1)] = 256,
    modes: Annotated[
        str, typer.Option(help="How transformers runs: one padded batch, single requests.")
    ] = "batch,single",
    runs: Runs = 2,
    threads: Annotated[int | None, typer.Option(help="CPU threads for each.", min=1)] = None,
    attention: options.Attention = None,
    load_format: LoadFormat = None,
    max_model_len: MaxModelLen = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    out: Out = None,
) -> None:
    """Compare throughput, time to first token and memory with transformers, same requests.

    With result files of `bench serve`: the endpoints beside one another, load by load.
    """
    if files:
        show_endpoints(files)
        return
    from nanovllm_bench.compare import compare_with_transformers
    from nanovllm_bench.record import write_record
    from nanovllm_bench.workloads import ragged_workload

    engine_config = options.loaded_config(ctx).config
    workload = ragged_workload(num_seqs, shortest, longest)
    result = compare_with_transformers(
        engine_config, workload, runs=runs, modes=modes.split(","), threads=threads
    )
    _show(result, against)
    if out is not None:
        write_record(out, result)


def show_endpoints(files: Sequence[Path]) -> None:
    """Print every load of the results; how many times as fast the first one is, by throughput."""
    from nanovllm_bench.plots import read_record
    from nanovllm_bench.serve.compare import by_load, names_of

    names = names_of(files)
    records = dict(zip(names, map(read_record, files), strict=True))
    parts = (f"{name}\np50 / p90 / p99, ms" for name in ("first token", "between tokens"))
    table = Table("load", "endpoint", "output tok/s", *parts, f"{names[0]} is")
    for load, runs in by_load(records).items():
        first = runs.get(names[0])
        for name, run in runs.items():
            ratio = first and first is not run and run["tokens_per_second"]
            table.add_row(
                load,
                name + (" (INVALID)" if run["invalid"] else ""),
                f"{run['tokens_per_second']:,.0f}",
                milliseconds(run["ttft_ms"]),
                milliseconds(run["inter_token_ms"]),
                f"{first['tokens_per_second'] / ratio:.2f} × as fast" if first and ratio else "",
            )
    wide_console().print(table)


def _show(result: dict[str, Any], against: str) -> None:
    roofline = result["ours"]["roofline"]
    show_rows(
        {
            "workload": f"{result['workload']}: {result['prompt_tokens']:,} prompt tokens, "
            f"{result['output_tokens']:,} output tokens",
            **engine_rows(result),
            "transformers": result["environment"]["packages"]["transformers"],
            "CPU threads": str(result["threads"]),
            "device rates": rates(roofline),
            "roofline": f"{percent(roofline['share'])} of it",
        }
    )
    table = Table("", "output tok/s", "first token p50", "peak memory", "we are")
    rows = {"nanovllm": result["ours"]}
    rows |= {f"{against}, {mode}": one for mode, one in result["transformers"].items()}
    ratios = {f"{against}, {mode}": ratio for mode, ratio in result["speed_up"].items()}
    for name, one in rows.items():
        peak = one["peak_memory_gib"]
        table.add_row(
            name,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['ttft_ms']['p50']:,.0f} ms",
            "–" if peak is None else f"{peak} GiB",
            f"{ratios[name]:.2f} × as fast" if name in ratios else "",
        )
    wide_console().print(table)
