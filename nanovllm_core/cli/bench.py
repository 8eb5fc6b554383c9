"""`nanovllm bench`: measure, and say what really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")


@app.callback()
def _bench() -> None:
    """Measure speed on this machine."""


@app.command()
def throughput(
    model: Annotated[str, typer.Option(help="Folder, checkpoint plugin or hub id.")] = "demo",
    config: Annotated[Path | None, typer.Option(help="A YAML configuration file.")] = None,
    num_seqs: Annotated[int, typer.Option(help="How many requests.", min=1)] = 256,
    input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens of every request; default: the nano workload.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Output tokens of every request; goes with --input-len.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Backend, or PREFILL+DECODE for a pair (flash+triton).")
    ] = None,
    load_format: Annotated[
        str | None, typer.Option(help="dummy: random weights, config.json alone is needed.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6,
    runs: Annotated[int, typer.Option(help="Counted runs, after one that is not.", min=1)] = 3,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field, as path=value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Output tokens per second of one batch, prefill included (default: nano-vllm's workload)."""
    from nanovllm_core.bench.throughput import measure_throughput
    from nanovllm_core.bench.workloads import fixed_workload, nano_workload
    from nanovllm_core.config_sources import load_config
    from nanovllm_core.llm import LLM

    if (input_len is None) != (output_len is None):
        raise typer.BadParameter("--input-len and --output-len go together")
    if input_len is None or output_len is None:
        workload = nano_workload(num_seqs)
    else:
        workload = fixed_workload(num_seqs, input_len, output_len)
    overrides: dict[str, Any] = _assignments(set_ or [])
    if load_format is not None:
        overrides["load_format"] = load_format
    if attention is not None:
        overrides["attention"] = attention_choice(attention)
    if max_model_len is not None:
        overrides["max_model_len"] = max_model_len
    with LLM.from_config(load_config(model, file=config, overrides=overrides)) as llm:
        result = measure_throughput(llm, workload, temperature=temperature, runs=runs)
    _show(result.to_json())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def attention_choice(text: str) -> Any:
    """`triton` -> itself; `flash+triton` -> the pair of prefill and decode backends."""
    if "+" not in text:
        return text
    prefill, decode = text.split("+", 1)
    return {"prefill": prefill, "decode": decode}


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """`cache.block_size=64` -> {"cache.block_size": 64}; values are YAML."""
    import yaml

    fields = {}
    for pair in pairs:
        path, found, value = pair.partition("=")
        if not found:
            raise typer.BadParameter(f"--set {pair}: expected path=value, as in cache.block_size=64")
        fields[path] = yaml.safe_load(value)
    return fields


def _show(result: dict[str, Any]) -> None:
    environment = result["environment"]
    rows = {
        "workload": f"{result['workload']}: {result['num_seqs']} requests, "
        f"{result['prompt_tokens']:,} prompt tokens, {result['output_tokens']:,} output tokens",
        "attention": result["attention"],
        "scheduler": result["scheduler"],
        "CUDA graphs": "on" if result["cuda_graphs"] else "off",
        "device": environment["device"]["name"],
        "torch": environment["packages"].get("torch", "?"),
        "KV cache": f"{result['num_blocks']:,} pages of {result['block_size']} tokens",
        "start": f"load {result['load_seconds']:.1f} s, capture {result['capture_seconds']:.1f} s",
        "runs": ", ".join(f"{seconds:.2f} s" for seconds in result["seconds"]),
        "host time per step": f"{result['host_us_per_step']:.0f} µs over {result['steps']:,} steps",
        "throughput": f"[bold]{result['tokens_per_second']:,.0f} output tok/s[/] (best run)",
    }
    if result["peak_memory_gib"] is not None:
        rows["peak memory"] = f"{result['peak_memory_gib']} GiB"
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
