"""`nanovllm bench attention`: attention alone, by backend and length."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.shared import names_of, numbers, wide_console
from nanovllm_core.cli import engine_options as options


def attention(
    phase: Annotated[Literal["prefill", "decode"], typer.Option(help="Phase to measure.")],
    backends: Annotated[
        str | None,
        typer.Option("--attention", help="Comma-separated backends (also NAME.VALUE and naive)."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Keys per sequence.")] = (
        "16,32,64,128,256,512,1024,2048,4096,8192"
    ),
    batch: Annotated[int, typer.Option(help="Number of sequences.", min=1)] = 8,
    num_heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 16,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 8,
    head_size: Annotated[int, typer.Option(help="Head size.", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs per cell.", min=1)] = 5,
    device: options.Device = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "auto"], typer.Option(help="Number format.")
    ] = "auto",
    out: Out = None,
) -> None:
    """Time each backend and a naive attention: ms, TFLOP/s or TB/s, grid and launches."""
    import torch

    from nanovllm_bench.attention import able_backends, measure_attention
    from nanovllm_bench.attention_cases import AttentionSetup
    from nanovllm_bench.environment import describe_environment
    from nanovllm_bench.record import write_record
    from nanovllm_core.selection import resolve_device

    if num_heads % num_kv_heads:
        raise typer.BadParameter(
            f"--num-heads: {num_heads} is no multiple of the {num_kv_heads} of --num-kv-heads, "
            "each of which serves as many"
        )
    place = torch.device(resolve_device(device or "auto"))
    default_dtype = "bfloat16" if place.type == "cuda" else "float32"
    setup = AttentionSetup(
        phase=phase,
        device=place,
        dtype=getattr(torch, default_dtype if dtype == "auto" else dtype),
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    names = names_of(backends, "--attention") if backends is not None else able_backends(setup)
    if place.type == "cuda":
        torch.cuda.set_device(place)  # graphs and launches go to the current one
    with torch.inference_mode():
        result = measure_attention(setup, names, numbers(lengths, "--lengths"), repeats)
    result["device"] = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    result["environment"] = describe_environment()
    _show(result, names)
    if out is not None:
        write_record(out, result)


def _show(result: dict[str, Any], names: list[str]) -> None:
    console = wide_console()
    for name, what in result["ran"].items():
        console.print(f"{name}: {what}")
    environment, rates = result["environment"], result["rates"]
    console.print(
        f"{result['device']}, {result['dtype']}, torch {environment['packages']['torch']}; copy "
        f"{rates['copy_bytes_per_s'] / 1e12:.3g} TB/s, matrix product "
        f"{rates['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s, measured first; "
        f"{result['batch']} sequences, {result['phase']}"
    )
    rate, unit = ("tb_per_s", "TB/s") if result["phase"] == "decode" else ("tflop_per_s", "TFLOP/s")
    columns = ("length", "backend", "ms", unit, "share", "grid", "launches", "peak MiB", "error")
    table = Table(*columns, "graph")
    for row in result["rows"]:
        for name in names:
            cell = row["backends"][name]
            shown = f"[bold]{name}[/]" if name == row["winner"] else name
            table.add_row(str(row["length"]), shown, *_cells(cell, rate))
    console.print(table, "bold: the winner of its length")


def _cells(cell: dict[str, Any], rate: str) -> list[str]:
    if isinstance(cell["ms"], str):
        return [cell["ms"]]
    grid = "–" if cell["grid"] is None else "x".join(map(str, cell["grid"]))
    return [
        f"{cell['ms']:.4f}",
        f"{cell[rate]:.3g}",
        f"{100 * cell['share']:.0f} %",
        grid,
        "–" if cell["launches"] is None else f"{cell['launches']:g}",
        "–" if cell["peak_mib"] is None else f"{cell['peak_mib']:g}",
        f"{cell['relative_error']:.1e}",
        "yes" if cell["cuda_graph"] else "no",
    ]
