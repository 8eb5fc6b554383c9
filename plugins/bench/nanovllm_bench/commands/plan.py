"""`nanovllm plan`: memory, sequences and the floor of decoding on GPUs that need not be here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nanovllm_bench.commands.shared import MAX_NUMBER, MaxModelLen, wide_console
from nanovllm_core.cli import engine_options as options

if TYPE_CHECKING:
    from nanovllm_bench.gpus import Gpu
    from nanovllm_bench.plan import Layout, Memory

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of sequences whose number is printed, as far as the model goes."""

ARITHMETIC = (
    "Weights, bytes of a block and floors are arithmetic. Workspaces, graphs and CUDA's context "
    "are estimates. Connections between GPUs take memory that is not counted. Floors leave out "
    "activations, sampling, launches and the host."
)


def plan(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs of one host.", min=1, max=64)] = 1,
    gpu: Annotated[
        str, typer.Option(help="A GPU's name, such as H200, or local: this machine's, measured.")
    ] = "local",
    input_len: Annotated[
        int, typer.Option(help="Prompt tokens of a sequence.", min=1, max=MAX_NUMBER)
    ] = 512,
    output_len: Annotated[
        int, typer.Option(help="Output tokens of a sequence.", min=1, max=MAX_NUMBER)
    ] = 512,
    attention: options.Attention = None,
    max_model_len: MaxModelLen = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Memory, sequences and the floor of decoding, for each split of the GPUs; loads no weights.

    The configuration's device and tensor_parallel_size are not read: every split is shown.
    """
    from nanovllm_bench.gpus import find_gpu
    from nanovllm_bench.plan import plan_layouts

    engine_config = options.loaded_config(ctx).config
    planned = find_gpu(gpu)
    lengths = sorted({input_len + output_len, *LENGTHS})
    layouts = plan_layouts(engine_config, planned, gpus, lengths, input_len, output_len)
    notes = [*_cuts(layouts, input_len + output_len), *_notes(planned)]
    if as_json:
        record = as_record(engine_config.model, planned, gpus, layouts, notes)
        print(json.dumps(record, indent=2))
        return
    _show(engine_config.model, planned, gpus, layouts, notes)


def as_record(
    model: str, gpu: Gpu, num_gpus: int, layouts: list[Layout], notes: list[str]
) -> dict[str, Any]:
    """The plan as JSON: bytes, tokens per second, and where each figure is from."""
    return {
        "model": model,
        "gpus": num_gpus,
        "gpu": asdict(gpu),
        "layouts": [asdict(one) for one in layouts],
        "notes": notes,
    }


def _show(model: str, gpu: Gpu, num_gpus: int, layouts: list[Layout], notes: list[str]) -> None:
    console = wide_console()
    rates = gpu.rates
    console.print(
        f"{model} on {num_gpus} x {gpu.name}: {_gib(gpu.memory_bytes)} GiB, "
        f"{rates.copy_bytes_per_s / 1e12:.3g} TB/s, {rates.matmul_flops_per_s / 1e12:,.4g} TFLOP/s",
        style="bold",
        markup=False,
        highlight=False,
    )
    for problem in (one for one in layouts if one.problem):
        name = _name(problem)
        console.print(f"not {name}: {problem.problem}", style="dim", markup=False, highlight=False)
    able = [one for one in layouts if one.memory is not None]
    console.print(_memory_table(able))
    console.print(_rooms_table(able))
    console.print(_speeds_table(able))
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)


def _memory_table(layouts: list[Layout]) -> Table:
    table = Table(
        *("engines x GPUs", "weights", "workspaces", "graphs", "context", "blocks", "in number"),
        *("usable",),
        title="GiB of each GPU",
    )
    for one in layouts:
        if memory := one.memory:
            table.add_row(_name(one), *_memory_row(memory))
    return table


def _memory_row(memory: Memory) -> list[str]:
    parts = memory.weights, memory.workspaces, memory.graphs, memory.context, memory.blocks
    number = f"{memory.num_blocks:,} of {memory.block_size} tokens"
    return [*map(_gib, parts), number, _gib(memory.usable)]


def _rooms_table(layouts: list[Layout]) -> Table:
    tokens = sorted({room.tokens for one in layouts for room in one.rooms})
    table = Table("tokens of each", *map(_name, layouts), title="sequences that fit in each engine")
    for length in tokens:
        found = [{room.tokens: room.sequences for room in one.rooms} for one in layouts]
        table.add_row(
            f"{length:,}", *(f"{one[length]:,}" if length in one else "" for one in found)
        )
    return table


def _speeds_table(layouts: list[Layout]) -> Table:
    table = Table(
        *("engines x GPUs", "sequences in each", "tokens", "context", "floor", "with all-reduces"),
        "all-reduces are",
        title="decoding, output tok/s of all GPUs",
    )
    for one in layouts:
        for speed in one.speeds:
            total = speed.with_communication
            table.add_row(
                _name(one),
                f"{speed.rows:,}",
                f"{speed.tokens:,}",
                f"{speed.context:,}",
                f"{speed.floor:,.0f}",
                "links unknown" if total is None else f"{total:,.0f}",
                _origin(one),
            )
    return table


def _origin(layout: Layout) -> str:
    if layout.tensor_parallel == 1:
        return "none"
    return "measured" if layout.all_reduce_measured else "arithmetic, no latency"


def _cuts(layouts: list[Layout], tokens: int) -> list[str]:
    """Where floors are of shorter sequences than were asked for."""
    longest = {one.max_model_len for one in layouts if one.max_model_len is not None}
    return [
        f"Sequences of {tokens:,} tokens are cut to {one:,}, the longest of an engine here: lower "
        "--input-len or --output-len, or raise --max-model-len as far as model and memory allow."
        for one in sorted(longest)
        if one < tokens
    ]


def _notes(gpu: Gpu) -> list[str]:
    """Where the figures are from."""
    notes = [f"GPU: {gpu.source}.", ARITHMETIC]
    if gpu.all_reduce_source:
        notes.append(f"Measured all-reduces: {gpu.all_reduce_source}.")
    return notes


def _name(layout: Layout) -> str:
    return f"{layout.data_parallel} x {layout.tensor_parallel}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
