"""What the benchmarks' commands share: flags, and the lines that say what really ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nanovllm_core.errors import shown

if TYPE_CHECKING:
    from nanovllm_bench.workloads import Workload

LoadFormat = Annotated[
    str | None, typer.Option(help="dummy: random weights; needs only config.json.")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Maximum sequence length, in tokens.")]
NumSeqs = Annotated[int, typer.Option(help="Number of requests.", min=1)]
Runs = Annotated[int, typer.Option(help="Measured runs, after one warm-up run.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]

MAX_NUMBER = 2**31 - 1
"""Lengths and positions are 32 bits wide on the device."""


def above_zero(value: float) -> float:
    """The value of a flag, or a usage error."""
    if not value > 0:  # which nan is not either
        raise typer.BadParameter(f"{value} must be above 0")
    return value


def numbers(text: str, flag: str) -> list[int]:
    """`1,16,64` -> [1, 16, 64], each once; a usage error for anything else."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(
            f"{flag}: {shown(text)} is no list of whole numbers such as 1,16,64"
        )
    if max(values) > MAX_NUMBER:
        raise typer.BadParameter(f"{flag}: {max(values)} is above {MAX_NUMBER}; give less")
    return [*dict.fromkeys(values)]


def workload_of(num_seqs: int, input_len: int | None, output_len: int | None) -> Workload:
    """The nano workload, or one of fixed lengths where they are given."""
    from nanovllm_bench.workloads import fixed_workload, nano_workload

    if (input_len is None) != (output_len is None):
        raise typer.BadParameter("--input-len and --output-len go together")
    if input_len is None or output_len is None:
        return nano_workload(num_seqs)
    return fixed_workload(num_seqs, input_len, output_len)


def names_of(text: str, flag: str) -> list[str]:
    """`flash,sdpa` -> ["flash", "sdpa"], each once; a usage error where one is empty."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(
            f"{flag}: {shown(text)} is no list of names such as flash,sdpa.math"
        )
    return [*dict.fromkeys(names)]


def engine_rows(result: Mapping[str, Any]) -> dict[str, str]:
    """What really ran, of a result made by `describe_engine`."""
    environment = result["environment"]
    packages = environment["packages"]
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if name in packages]
    commit = environment["commit"] or "no checkout"
    state = {True: "clean", False: "changed", None: "unknown"}[environment["clean_tree"]]
    return {
        "attention": f"{result['backend']}: {result['attention']}",
        "scheduler": result["scheduler"],
        "CUDA graphs": _graphs(result),
        "device": f"{result['device']}, {result['dtype']}",
        "versions": ", ".join([f"Python {environment['python']}", *versions]),
        "commit": f"{commit[:12]}, tree {state}",
        "KV cache": f"{result['num_blocks']:,} blocks of {result['block_size']} tokens",
        "start": f"load {result['load_seconds']:.1f} s, capture {result['capture_seconds']:.1f} s",
    }


def _graphs(result: Mapping[str, Any]) -> str:
    if not result["cuda_graphs"]:
        return "off"
    sizes = result["prompt_graph_sizes"]
    return f"on, with up to {sizes[-1]:,} prompt tokens" if sizes else "on, prompts without"


def wide_console() -> Console:
    """The terminal's width, and in a file or a pipe room for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def show_rows(rows: Mapping[str, str]) -> None:
    """Names and values, one per line."""
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    wide_console().print(table)


def percent(share: float | None) -> str:
    return "not known here" if share is None else f"{100 * share:.0f} %"


def memory(gib: float | None) -> str:
    return "not known here" if gib is None else f"{gib} GiB"


def rates(roofline: Mapping[str, Any]) -> str:
    """The device's measured rates, of a result's `roofline`."""
    measured = roofline["rates"]
    return (
        f"copy {measured['copy_bytes_per_s'] / 1e12:.3g} TB/s, matrix product "
        f"{measured['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s, measured first"
    )
