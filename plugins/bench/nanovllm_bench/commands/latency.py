"""`nanovllm bench latency`: time to first token and between tokens, as requests arrive."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any, Literal

import typer

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.shared import (
    LoadFormat,
    MaxModelLen,
    NumSeqs,
    Temperature,
    above_zero,
    engine_rows,
    memory,
    percent,
    rates,
    show_rows,
)
from nanovllm_core.cli import engine_options as options


def latency(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    num_seqs: NumSeqs = 64,
    input_len: Annotated[int, typer.Option(help="Prompt tokens per request.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens per request.", min=2)] = 128,
    rate: Annotated[
        float, typer.Option(help="Requests per second; inf: all at once.", callback=above_zero)
    ] = 8.0,
    arrivals: Annotated[
        Literal["fixed", "poisson"], typer.Option(help="Evenly spaced, or a Poisson process.")
    ] = "poisson",
    seed: Annotated[int, typer.Option(help="Seed of the Poisson process.")] = 0,
    attention: options.Attention = None,
    load_format: LoadFormat = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = 0.6,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
    out: Out = None,
) -> None:
    """Measure time to first token and between tokens, at fixed or Poisson arrivals."""
    from nanovllm_bench.latency import measure_latency
    from nanovllm_bench.record import write_record
    from nanovllm_bench.workloads import fixed_workload
    from nanovllm_core.frontend import AsyncLLM

    engine_config = options.loaded_config(ctx).config
    options.show_choices()
    with closing(AsyncLLM.from_config(engine_config)) as llm:
        result = measure_latency(
            llm,
            fixed_workload(num_seqs, input_len, output_len),
            rate=rate,
            arrivals=arrivals,
            seed=seed,
            temperature=temperature,
        )
    _show(result)
    if out is not None:
        write_record(out, result)


def _show(result: dict[str, Any]) -> None:
    show_rows(
        {
            "workload": f"{result['workload']}, {_arrivals(result)}",
            **engine_rows(result),
            "GPU utilisation": percent(result["gpu_utilisation"]),
            "peak memory": memory(result["peak_memory_gib"]),
            "device rates": rates(result["roofline"]),
            "running": f"{result['mean_running']:.1f} requests on average, "
            f"{result['tokens_per_second']:,.0f} output tok/s",
            "roofline": f"{percent(result['roofline']['share'])} of it: a decode step of that "
            f"batch takes no less than {1e3 * result['roofline']['floor_seconds']:.3g} ms",
            "time to first token": _milliseconds(result["ttft_ms"]),
            "between tokens": _milliseconds(result["inter_token_ms"]),
        }
    )


def _arrivals(result: dict[str, Any]) -> str:
    """How the requests of a result came."""
    if result["rate"] is None:
        return "all at once"
    return f"{result['rate']:g} requests per second, {result['arrivals']} arrivals"


def _milliseconds(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} ms" for name, value in values.items())
