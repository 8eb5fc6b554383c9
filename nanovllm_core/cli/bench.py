"""`nanovllm bench`: measure, and say what really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nanovllm_core.cli import engine_options as options

if TYPE_CHECKING:
    from nanovllm_core.bench.workloads import Workload

app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@app.callback()
def _bench() -> None:
    """Measure speed on this machine."""


@app.command()
def throughput(
    model: options.Model = None,
    config: options.ConfigFile = None,
    num_seqs: Annotated[int, typer.Option(help="How many requests.", min=1)] = 256,
    input_len: Annotated[
        int | None,
        typer.Option(help="Prompt tokens of every request; default: the nano workload.", min=1),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(help="Output tokens of every request; goes with --input-len.", min=1),
    ] = None,
    attention: options.Attention = None,
    load_format: Annotated[
        str | None, typer.Option(help="dummy: random weights, config.json alone is needed.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6,
    runs: Annotated[int, typer.Option(help="Counted runs, after one that is not.", min=1)] = 3,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Output tokens per second of one batch, prefill included (default: nano-vllm's workload)."""
    from nanovllm_core.bench.throughput import measure_throughput

    flags = {"load_format": load_format, "limits.max_model_len": max_model_len}
    given = [f"{path}={value}" for path, value in flags.items() if value is not None]
    engine_config = options.engine_config(
        model, config, attention, scheduler, device, dtype, [*(settings or []), *given]
    )
    workload = _workload(num_seqs, input_len, output_len)
    with options.open_llm(engine_config) as llm:
        result = measure_throughput(llm, workload, temperature=temperature, runs=runs).to_json()
    _show(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _workload(num_seqs: int, input_len: int | None, output_len: int | None) -> Workload:
    from nanovllm_core.bench.workloads import fixed_workload, nano_workload

    if (input_len is None) != (output_len is None):
        raise typer.BadParameter("--input-len and --output-len go together")
    if input_len is None or output_len is None:
        return nano_workload(num_seqs)
    return fixed_workload(num_seqs, input_len, output_len)


def _show(result: dict[str, Any]) -> None:
    environment = result["environment"]
    rows = {
        "workload": f"{result['workload']}: {result['num_seqs']} requests, "
        f"{result['prompt_tokens']:,} prompt tokens, {result['output_tokens']:,} output tokens",
        "attention": result["attention"],
        "scheduler": result["scheduler"],
        "CUDA graphs": "on" if result["cuda_graphs"] else "off",
        "device": result["device"],
        "torch": environment["packages"].get("torch", "?"),
        "KV cache": f"{result['num_blocks']:,} pages of {result['block_size']} tokens",
        "start": f"load {result['load_seconds']:.1f} s, capture {result['capture_seconds']:.1f} s",
        "runs": ", ".join(f"{seconds:.2f} s" for seconds in result["seconds"]),
        "host time per step": f"{result['host_us_per_steady_step']:.0f} µs per steady decode step, "
        f"{result['host_us_per_step']:.0f} µs over all {result['steps']:,} steps",
        "throughput": f"[bold]{result['tokens_per_second']:,.0f} output tok/s[/] (best run)",
    }
    if result["peak_memory_gib"] is not None:
        rows["peak memory"] = f"{result['peak_memory_gib']} GiB"
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
