"""The table that users look for: decode speed by backend, batch and length.

Every request has as many output tokens as prompt tokens. One engine per backend serves all cells,
so that starts cost once; a cell that runs out of memory says `OOM`, and the next gets a new engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import torch

from nanovllm_bench.record import describe_engine
from nanovllm_bench.throughput import Gauge, measure_runs, timed_generate
from nanovllm_bench.workloads import Workload, fixed_workload
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import ConfigError, OutOfMemoryError, shown
from nanovllm_core.frontend import LLM
from nanovllm_core.registry import get_plugin_manager
from nanovllm_core.selection import Decisions

OOM = "OOM"
WARM_UP_STEPS = 8
OUT_OF_MEMORY = (torch.OutOfMemoryError, OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class TableCells:
    """Which cells to measure; a cell expected to take more than `max_seconds` is left out."""

    backends: Sequence[str]
    batches: Sequence[int]
    lengths: Sequence[int]
    runs: int = 1
    max_seconds: float = 60.0
    temperature: float = 0.6

    def check(self, max_model_len: int) -> None:
        """ConfigError where prompt and output of a length do not fit the model length."""
        for length in self.lengths:
            if 2 * length > max_model_len:
                raise ConfigError(
                    f"length {length} needs {2 * length} tokens per request, prompt and output "
                    f"alike, and max_model_len is {max_model_len}; give --max-model-len "
                    f"{2 * length}, or leave lengths above {max_model_len // 2} out"
                )


def attention_named(name: str) -> Any:
    """`sdpa` -> itself; `sdpa.math` -> the backend with the one option that takes the value "math".

    `flash+triton` is a pair of a prefill and a decode backend. ConfigError where no option, or more
    than one, takes the value.
    """
    if "+" in name:
        prefill, decode = name.split("+", 1)
        return {"prefill": attention_named(prefill), "decode": attention_named(decode)}
    backend, dot, value = name.partition(".")
    if not dot:
        return backend
    fields = get_plugin_manager().spec("attention", backend).options.model_fields
    choices = {
        key: get_args(field.annotation)
        for key, field in fields.items()
        if get_origin(field.annotation) is Literal
    }
    takers = [key for key, values in choices.items() if value in values]
    if len(takers) != 1:
        offered = [f"{backend}.{v}" for values in choices.values() for v in values]
        raise ConfigError(
            f"attention {shown(name)}: {len(takers)} options of {shown(backend)} take "
            f"{shown(value)}; "
            f"these names can be given: {', '.join([backend, *offered])}"
        )
    return {"backend": backend, "options": {takers[0]: value}}


def measure_table(
    make_config: Callable[[Any], EngineConfig],
    cells: TableCells,
    on_cell: Callable[[str, dict[str, Any]], None] = lambda _text, _record: None,
) -> dict[str, Any]:
    """All cells; `make_config` gets a choice of attention. The record of a result file.

    `on_cell` gets a line and the record so far, so that an interrupted table keeps its cells. Their
    shares of the roofline come last, and are in the returned record alone.
    """
    configs = {name: make_config(attention_named(name)) for name in cells.backends}
    for config in configs.values():  # what is wrong is known before anything is loaded
        if isinstance(config.limits.max_model_len, int):
            cells.check(config.limits.max_model_len)
        _ = Decisions(config).attention
    engines: dict[str, Any] = {}
    rows: dict[tuple[int, int], dict[str, Any]] = {
        (batch, length): {} for batch in cells.batches for length in cells.lengths
    }
    measured: list[tuple[Gauge, EngineConfig, int, int, dict[str, Any]]] = []

    def record() -> dict[str, Any]:
        return {
            "benchmark": "table",
            "temperature": cells.temperature,
            "cells": [
                {"batch": batch, "length": length, "backends": dict(row), **judge(row)}
                for (batch, length), row in rows.items()
            ],
            "engines": dict(engines),
        }

    for name, config in configs.items():
        left_out: list[tuple[int, int]] = []
        with ExitStack() as stack:
            opened: list[tuple[LLM, Gauge]] = []
            for (batch, length), row in rows.items():
                try:
                    if any(b <= batch and n <= length for b, n in left_out):
                        row[name] = _left_out(cells, "a smaller cell takes longer")
                    else:
                        if not opened:
                            llm = stack.enter_context(_open(config, cells))
                            opened.append((llm, Gauge.of(llm)))
                            engines[name] = describe_engine(llm)
                        row[name] = measure_cell(*opened[-1], batch, length, cells)
                        measured.append((opened[-1][1], config, batch, length, row[name]))
                except OUT_OF_MEMORY as error:
                    row[name] = {"result": OOM, "reason": str(error).splitlines()[0]}
                    opened.clear()
                    stack.close()
                if row[name]["result"] != OOM and isinstance(row[name]["result"], str):
                    left_out.append((batch, length))
                on_cell(f"{name} {batch} x {length}: {row[name]['result']}", record())
    for gauge, config, batch, length, cell in measured:  # behind all runs: see `Gauge.rates`
        if seconds := cell.get("seconds"):
            workload, most = fixed_workload(batch, length, length), config.limits.max_num_seqs
            cell["roofline"] = gauge.roofline(workload, most, min(seconds))
    return record()


def _left_out(cells: TableCells, reason: str) -> dict[str, Any]:
    return {"result": f"> {cells.max_seconds:g} s", "reason": reason}


def _open(config: EngineConfig, cells: TableCells) -> LLM:
    llm = LLM.from_config(config)
    try:
        cells.check(llm.info.max_model_len)
    except ConfigError:
        llm.close()
        raise
    return llm


def measure_cell(
    llm: LLM, gauge: Gauge, batch: int, length: int, cells: TableCells
) -> dict[str, Any]:
    """Output tokens per second of `batch` requests of `length` prompt and output tokens."""
    workload = fixed_workload(batch, length, length).within(llm.info.vocab_size)
    expected = expected_seconds(llm, workload, cells.temperature)
    if expected > cells.max_seconds:
        return _left_out(cells, f"about {expected:.0f} s a run")
    runs = measure_runs(llm, workload, gauge, temperature=cells.temperature, runs=cells.runs)
    return {
        "result": round(workload.num_output_tokens / min(runs.seconds), 1),
        "seconds": [round(seconds, 4) for seconds in runs.seconds],
        "gpu_utilisation": runs.gpu_utilisation,
        "peak_memory_gib": gauge.peak_memory_gib(),
    }


def expected_seconds(llm: LLM, workload: Workload, temperature: float) -> float:
    """How long a run will take, from its prompts and a few steps; compiles what its shapes need."""

    def run(num_tokens: int) -> float:
        few = replace(workload, output_lens=[num_tokens] * len(workload.prompts))
        return timed_generate(llm, few, temperature)

    steps = min(WARM_UP_STEPS, workload.output_lens[0] - 1)
    if steps < 1:
        return run(1)
    run(1 + steps)
    prompts = run(1)
    per_step = max(0.0, run(1 + steps) - prompts) / steps
    return prompts + workload.output_lens[0] * per_step


def judge(row: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The fastest backend of a cell, and how many times as fast as the next one it is."""
    rates = sorted(
        ((cell["result"], name) for name, cell in row.items() if isinstance(cell["result"], float)),
        reverse=True,
    )
    if not rates:
        return {"winner": None, "speed_up": None}
    second = rates[1][0] if len(rates) > 1 else math.nan
    speed_up = None if math.isnan(second) else round(rates[0][0] / second, 3)
    return {"winner": rates[0][1], "speed_up": speed_up}
