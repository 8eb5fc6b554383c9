"""The nano workload of requests that ask for more than a temperature, beside plain ones, by turns.

    python benchmarks/asking.py --model benchmarks/configs/qwen3-0.6b [--turns 3] --out FILE

In each turn every kind runs once, and the best run of each counts. One engine serves all kinds.
A minute on one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import write_record
from nanovllm_bench.throughput import sampling_params
from nanovllm_bench.workloads import Workload, load_format, nano_workload
from nanovllm_core import LLM

PLAIN = "plain"
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}
TEMPERATURE = 0.6


def seconds_of(llm: LLM, workload: Workload, asked: dict[str, Any]) -> float:
    """Seconds of one `generate` call in which every request asks for this, prompts included."""
    params = [replace(one, **asked) for one in sampling_params(workload, TEMPERATURE)]
    llm.reset_prefix_cache()
    started = time.perf_counter()
    llm.generate(workload.prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def measure(llm: LLM, workload: Workload, turns: int) -> dict[str, dict[str, Any]]:
    """By kind: all times, the best rate, and that beside the best of plain requests."""
    workload = workload.within(llm.info.vocab_size)
    for asked in KINDS.values():  # the first of each compiles its kernels
        seconds_of(llm, replace(workload, output_lens=[2] * len(workload.prompts)), asked)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(turns):
        for kind, asked in KINDS.items():
            times[kind].append(seconds_of(llm, workload, asked))
    return {
        kind: {
            "seconds": [round(one, 4) for one in seconds],
            "tokens_per_second": round(workload.num_output_tokens / min(seconds), 1),
            "to_plain": round(min(times[PLAIN]) / min(seconds), 4),
        }
        for kind, seconds in times.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", default="{}", help="further settings, as JSON")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args(argv)
    settings = {
        "load_format": load_format(arguments.model),
        "max_model_len": 4096,
        "max_num_seqs": arguments.num_seqs,
        **json.loads(arguments.settings),
    }
    with LLM(arguments.model, **settings) as llm:
        kinds = measure(llm, nano_workload(arguments.num_seqs), arguments.turns)
    for kind, one in kinds.items():
        rate = one["tokens_per_second"]
        print(f"{kind:24} {rate:10,.1f} tok/s  {one['to_plain']:.3f} of plain", flush=True)
    if arguments.out is not None:
        record = {
            "benchmark": "asking",
            "model": arguments.model,
            "kinds": kinds,
            "environment": describe_environment(),
        }
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
