"""`nanovllm bench throughput`: output tokens per second of one batch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.shared import (
    LoadFormat,
    MaxModelLen,
    NumSeqs,
    Runs,
    Temperature,
    engine_rows,
    memory,
    percent,
    rates,
    show_rows,
    workload_of,
)
from nanovllm_core.cli import engine_options as options


def throughput(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    num_seqs: NumSeqs = 256,
    input_len: Annotated[
        int | None,
        typer.Option(help="Prompt tokens per request; default: the nano workload.", min=1),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(help="Output tokens per request; goes with --input-len.", min=1),
    ] = None,
    attention: options.Attention = None,
    load_format: LoadFormat = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = 0.6,
    runs: Runs = 3,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    out: Out = None,
) -> None:
    """Measure output tokens per second of one batch, prefill included."""
    from nanovllm_bench.experts import with_touched_experts
    from nanovllm_bench.record import write_record
    from nanovllm_bench.throughput import measure_throughput

    engine_config = options.loaded_config(ctx).config
    workload = workload_of(num_seqs, input_len, output_len)
    with options.open_llm(engine_config) as llm:
        result = measure_throughput(llm, workload, temperature=temperature, runs=runs)
    result = with_touched_experts(result, engine_config, workload)
    _show(result)
    if out is not None:
        write_record(out, result)


def _show(result: dict[str, Any]) -> None:
    roofline = result["roofline"]
    show_rows(
        {
            "workload": f"{result['workload']}: {result['num_seqs']} requests, "
            f"{result['prompt_tokens']:,} prompt tokens, {result['output_tokens']:,} output tokens",
            **engine_rows(result),
            "runs": ", ".join(f"{seconds:.2f} s" for seconds in result["seconds"]),
            "host time per step": f"{result['host_us_per_steady_step']:.0f} µs per steady decode "
            f"step, {result['host_us_per_step']:.0f} µs over all {result['steps']:,} steps",
            "GPU utilisation": percent(result["gpu_utilisation"]),
            "peak memory": memory(result["peak_memory_gib"]),
            **_experts(result),
            "device rates": rates(roofline),
            "roofline": f"{percent(roofline['share'])} of it: at these rates no less than "
            f"{roofline['floor_seconds']:.2f} s, "
            f"{result['output_tokens'] / roofline['floor_seconds']:,.0f} tok/s",
            "throughput": f"[bold]{result['tokens_per_second']:,.0f} output tok/s[/] (best run)",
        }
    )


def _experts(result: dict[str, Any]) -> dict[str, str]:
    """The experts that a decode step touches; no line where the model has none."""
    touched = result.get("touched_experts")
    if touched is None:
        return {}
    mean = result["roofline"].get("touched_experts")
    if mean is None:
        return {"experts": f"not counted: {touched.get('not_counted', 'no step decodes alone')}"}
    num_experts = result["roofline"]["costs"]["num_experts"]
    return {
        "experts": f"a layer's decode step touches {mean:.1f} of {num_experts}, counted in "
        f"{touched['decode_steps']:,} steps of an eager run"
    }
