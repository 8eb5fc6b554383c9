"""One model on one and several GPUs of a host: output tokens per second, by layout and workload.

    python benchmarks/parallel.py --model benchmarks/configs/qwen3-8b --out FILE \
        --layouts 1 2:nccl 2:symmetric d2 --workloads "nano" "1 x 512/512"

A layout is a number of ranks, with the way of their all-reduces, or `d` and a number of engines.
Engines share the requests, so d2 gets each of them twice, with other ids of the same number. One
sequence is greedy, others have temperature 0.6. A workload runs once to warm up and then `--runs`
times; the best counts. Each share is of the floor of a rank's own part of the model, without
communication, at the rates of one GPU. `late_steps` has for each rank how many steps its device
waited for, at most, and how many were launched with one in flight, warm-up runs included. A layout
that fails is recorded with its error, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from nanovllm_bench.apart import run_apart
from nanovllm_bench.environment import describe_environment
from nanovllm_bench.rates import measure_rates, model_costs
from nanovllm_bench.record import write_record
from nanovllm_bench.roofline import Rates, generate_floor
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import Workload, fixed_workload, load_format, nano_workload
from nanovllm_core import LLM
from nanovllm_core.errors import NanoVLLMError


def rates_of_one(device: str, dtype: str) -> Rates:
    """Those of one device, where nothing else runs."""
    return measure_rates(torch.device(device), getattr(torch, dtype))


def workload_of(name: str, times: int) -> Workload:
    """ "nano" or "N x INPUT/OUTPUT", each request so many times, with ids of its own."""
    if name == "nano":
        once = nano_workload()
    else:
        match = re.fullmatch(r"(\d+) x (\d+)/(\d+)", name)
        if match is None:
            raise SystemExit(f"workload {name!r}: expected 'nano' or 'N x INPUT/OUTPUT'")
        once = fixed_workload(*map(int, match.groups()))
    copies = zip(*(once.relabelled(turn).prompts for turn in range(times)), strict=True)
    prompts = [prompt for one in copies for prompt in one]
    return Workload(once.name, prompts, [n for n in once.output_lens for _ in range(times)])


def settings_of(layout: str) -> tuple[dict[str, Any], int]:
    """The settings of a layout, and its engines."""
    if layout.startswith("d"):
        return {"data_parallel_size": int(layout[1:])}, int(layout[1:])
    ranks, _, way = layout.partition(":")
    options = {"executor": {"name": "parallel", "options": {"all_reduce": way}}} if way else {}
    return {"tensor_parallel_size": int(ranks), **options}, 1


def floor_seconds(llm: LLM, ranks: int, workload: Workload, engines: int, rates: Rates) -> float:
    """Of one rank's part of the model, with one engine's share of the requests."""
    costs = model_costs(llm.config, getattr(torch, llm.info.dtype), ranks)
    lengths = workload.lengths[::engines]
    return generate_floor(costs, lengths, llm.config.limits.max_num_seqs, rates).seconds


@contextmanager
def keeping_errors() -> Iterator[IO[str]]:
    """What this process and those that it starts write to stderr, in a file; then shown there."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield kept
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            kept.seek(0)
            sys.stderr.write(kept.read())


def late_steps(errors: IO[str]) -> list[list[int]]:
    """What each rank says of its steps as it ends."""
    errors.seek(0)
    found = re.findall(r"idle before (\d+) of (\d+) overlapped steps", errors.read())
    return [[int(late), int(overlapped)] for late, overlapped in found]


def measure(layout: str, arguments: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """Every workload on one start of a layout."""
    settings, engines = settings_of(layout)
    settings.update(json.loads(arguments.settings))
    found: dict[str, Any] = {}
    with LLM(
        arguments.model,
        **{
            "load_format": load_format(arguments.model),
            "max_model_len": arguments.max_model_len,
            **settings,
        },
    ) as llm:
        info = llm.info
        record = {
            "choices": info.choices,
            "device": info.device,
            "num_blocks": info.num_blocks,
            "start_seconds": {part: round(s, 2) for part, s in info.start_seconds.items()},
            "workloads": found,
        }
        for name in arguments.workloads:
            workload = workload_of(name, engines).within(info.vocab_size)
            temperature = 0.0 if name.startswith("1 x") else 0.6
            seconds = [
                timed_generate(llm, workload, temperature) for _ in range(arguments.runs + 1)
            ][1:]
            ranks = settings.get("tensor_parallel_size", 1)
            floor = floor_seconds(llm, ranks, workload, engines, rates)
            found[name] = {
                "tokens_per_second": round(workload.num_output_tokens / min(seconds), 1),
                "seconds": [round(one, 4) for one in seconds],
                "share_of_floor": round(floor / min(seconds), 4),
            }
            show(layout, name, found[name])
    return record


def show(layout: str, name: str, row: dict[str, Any]) -> None:
    print(
        f"{layout:14} {name:16} {row['tokens_per_second']:10,.1f} tok/s, "
        f"{row['share_of_floor']:.0%} of the floor",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--layouts", nargs="+", required=True, metavar="LAYOUT")
    parser.add_argument("--workloads", nargs="+", required=True, metavar="WORKLOAD")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="cuda:0", help="whose rates are measured")
    parser.add_argument("--settings", default="{}", help="further settings, as JSON")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args(argv)
    for name in arguments.workloads:
        workload_of(name, 1)
    # Ranks say at their end how many steps the device had to wait for.
    logging.basicConfig()
    logging.getLogger("nanovllm_core").setLevel(logging.INFO)
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"  # as `dtype: auto` chooses
    rates = run_apart(rates_of_one, arguments.device, dtype)
    print(
        f"{rates.copy_bytes_per_s / 1e12:.2f} TB/s, {rates.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    layouts: dict[str, Any] = {}
    record = {
        "benchmark": "parallel",
        "model": arguments.model,
        "runs": arguments.runs,
        "max_model_len": arguments.max_model_len,
        "settings": arguments.settings,
        "rates": asdict(rates),
        "layouts": layouts,
        "environment": describe_environment(),
    }
    for layout in arguments.layouts:
        try:
            with keeping_errors() as errors:
                layouts[layout] = measure(layout, arguments, rates)
                layouts[layout]["late_steps"] = late_steps(errors)
        except NanoVLLMError as error:
            layouts[layout] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{layout}: {layouts[layout]['error']}", flush=True)
        if arguments.out:
            write_record(arguments.out, record)


if __name__ == "__main__":
    main()
