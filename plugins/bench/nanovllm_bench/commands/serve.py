"""`nanovllm bench serve`: load on an OpenAI-compatible endpoint, and what its clients saw."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from nanovllm_bench.commands.out import Out
from nanovllm_bench.commands.shared import (
    above_zero,
    numbers,
    percent,
    show_rows,
    wide_console,
    workload_of,
)
from nanovllm_core.cli import engine_options as options
from nanovllm_core.errors import UnsupportedError, shown


def _optional_above_zero(value: float | None) -> float | None:
    return None if value is None else above_zero(value)


def _rates(text: str) -> list[float]:
    """`10,50.5,inf` -> [10.0, 50.5, inf]."""
    try:
        return [above_zero(float(part)) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--rate: {shown(text)} is no list of numbers such as 10,50"
        ) from None


Limit = Annotated[
    float | None,
    typer.Option(help="Goodput: answers within this, ms.", callback=_optional_above_zero),
]


def serve(
    url: Annotated[str, typer.Option(help="The endpoint, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first in /v1/models.")] = None,
    clients: Annotated[
        str | None, typer.Option(help="Closed loop: clients that wait for answers, as 1,64,256.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: requests per second, as 10,50,100; inf: at once.")
    ] = None,
    arrivals: Annotated[
        Literal["fixed", "poisson"], typer.Option(help="Evenly spaced, or a Poisson process.")
    ] = "poisson",
    num_seqs: Annotated[int, typer.Option(help="Requests of each load.", min=1)] = 256,
    input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens; default: the nano workload.", min=1)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Output tokens; goes with --input-len.", min=1)
    ] = None,
    prompts: Annotated[
        Literal["ids", "text", "chat"],
        typer.Option(help="Token ids or text to /v1/completions, or /v1/chat/completions."),
    ] = "ids",
    long_prompts: Annotated[
        float | None,
        typer.Option(
            help="Long prompts per second beside the rest.", callback=_optional_above_zero
        ),
    ] = None,
    long_prompt_len: Annotated[int, typer.Option(help="Tokens of a long prompt.", min=1)] = 8192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.6,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for every token; a field that OpenAI itself does not have.")
    ] = True,
    body: Annotated[str, typer.Option(help="Further fields of a request, as JSON.")] = "{}",
    vocab_size: Annotated[int, typer.Option(help="Prompt ids are below it.", min=2)] = 10_001,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.", min=0)] = 0,
    processes: Annotated[int, typer.Option(help="Client processes.", min=1)] = 1,
    warm_up: Annotated[int, typer.Option(help="Requests that are not counted.", min=0)] = 8,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one request.", callback=above_zero)
    ] = 300.0,
    ttft_limit: Limit = None,
    tpot_limit: Limit = None,
    e2e_limit: Limit = None,
    out: Out = None,
) -> None:
    """Measure an OpenAI-compatible endpoint: throughput, first token, between tokens, goodput.

    The API key is taken from OPENAI_API_KEY.
    """
    levels = numbers(clients, "--clients") if clients else []
    rates = _rates(rate) if rate else []
    if not levels and not rates:
        raise typer.BadParameter("give --clients for a closed loop, --rate for an open one")
    workload = workload_of(num_seqs, input_len, output_len).within(vocab_size)
    fields = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    fields |= options.json_object(body)
    try:
        from nanovllm_bench.serve.client import Endpoint
        from nanovllm_bench.serve.load import LongPrompts
        from nanovllm_bench.serve.measure import Plan, measure_endpoint, served_model
        from nanovllm_bench.serve.summary import Objectives
    except ImportError as error:
        raise UnsupportedError(
            f'bench serve needs more packages ({error}): pip install "nanovllm-bench[serve]"'
        ) from error
    from nanovllm_bench.record import write_record

    key = os.environ.get("OPENAI_API_KEY")
    endpoint = Endpoint(url.rstrip("/"), model or "", prompts, fields, key, timeout)
    if model is None:
        endpoint = replace(endpoint, model=served_model(endpoint))
    plan = Plan(
        workload,
        levels,
        rates,
        arrivals,
        seed,
        processes,
        warm_up,
        LongPrompts(long_prompts, long_prompt_len, vocab_size=vocab_size) if long_prompts else None,
        Objectives(ttft_limit, tpot_limit, e2e_limit),
        exact_lengths=ignore_eos,
    )
    result = measure_endpoint(endpoint, plan, _tell)
    show_serve(result)
    if out is not None:
        write_record(out, result)


def _tell(run: Mapping[str, Any]) -> None:
    from nanovllm_bench.serve.compare import load_name

    typer.echo(f"{load_name(run)}: {run['tokens_per_second']:,.0f} output tok/s", err=True)


def show_serve(result: Mapping[str, Any]) -> None:
    """Print a result as a table, with the reasons why a load's figures cannot be trusted."""
    from nanovllm_bench.serve.compare import load_name

    environment = result["environment"]
    show_rows(
        {
            "endpoint": f"{result['endpoint']['url']}, {result['endpoint']['model']}",
            "workload": f"{result['workload']}, prompts as {result['prompts']}",
            "client": f"{environment['device']['name']}, Python {environment['python']}",
        }
    )
    table = Table(
        "load",
        "output tok/s",
        "requests/s",
        *(f"{name}\np50 / p90 / p99, ms" for name in ("first token", "between tokens", "whole")),
        "good",
        "errors",
    )
    for run in result["runs"]:
        table.add_row(
            load_name(run),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['requests_per_second']:.1f}",
            *(milliseconds(run[name]) for name in ("ttft_ms", "inter_token_ms", "e2e_ms")),
            percent(run["goodput"]["share"]) if run["goodput"] else "–",
            ", ".join(f"{one['count']} {kind}" for kind, one in run["errors"].items()) or "–",
        )
    wide_console().print(table)
    for run in result["runs"]:
        if run["long_prompts"]:
            typer.echo(
                f"{load_name(run)}: {run['long_prompts']['num_seqs']} long prompts, first token "
                f"{milliseconds(run['long_prompts']['ttft_ms'])} ms"
            )
        for reason in run["invalid"]:
            typer.echo(f"INVALID {load_name(run)}: {reason}", err=True)


def milliseconds(values: Mapping[str, float] | None) -> str:
    """`p50 / p90 / p99`, without a unit."""
    return "–" if values is None else " / ".join(f"{value:,.2f}" for value in values.values())
