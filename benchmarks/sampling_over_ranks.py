"""What sampling parameters cost where ranks share the vocabulary, beside greedy and temperature.

    python benchmarks/sampling_over_ranks.py --model benchmarks/configs/qwen3-8b --out FILE

Rows of 128 tokens, 64 where they are many, give 256 each, all with the same parameters. Each kind
runs briefly to warm up and once for its time; the first and the last are plain, and show how far
times vary. Half a minute on two GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import write_record
from nanovllm_bench.workloads import load_format
from nanovllm_core import LLM, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "top_p 0.95": {"top_p": 0.95},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
    "plain again": {},
}
MANY = 128
TEMPERATURE = 0.6


class Rows:
    """So many rows at once, of new prompts each time, so that none is cached."""

    def __init__(self, llm: LLM, num_rows: int) -> None:
        self._llm = llm
        self._num_rows = num_rows
        self._random = random.Random(0)

    def rate(self, parameters: dict[str, Any], output_tokens: int) -> float:
        """Output tokens per second, prompts included."""
        length = 128 if self._num_rows < MANY else 64
        vocab = self._llm.info.vocab_size
        prompts = [
            [self._random.randrange(vocab) for _ in range(length)] for _ in range(self._num_rows)
        ]
        asked = SamplingParams(
            temperature=TEMPERATURE, max_tokens=output_tokens, ignore_eos=True, **parameters
        )
        start = time.perf_counter()
        self._llm.generate(prompts, [asked] * self._num_rows, use_tqdm=False)
        return self._num_rows * output_tokens / (time.perf_counter() - start)


def measure(rows: Rows, output_tokens: int) -> dict[str, dict[str, float]]:
    """By kind: tokens per second, and beside those of the first."""
    found: dict[str, dict[str, float]] = {}
    for kind, parameters in KINDS.items():
        rows.rate(parameters, 8)
        rate = rows.rate(parameters, output_tokens)
        plain = next(iter(found.values()))["tokens_per_second"] if found else rate
        found[kind] = {"tokens_per_second": round(rate, 1), "to_plain": round(rate / plain, 3)}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--settings", default="{}", help="further settings, as JSON")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args(argv)
    settings = {
        "load_format": load_format(arguments.model),
        "tensor_parallel_size": arguments.ranks,
        "max_model_len": 2048,
        "max_num_seqs": max(arguments.rows),
        **json.loads(arguments.settings),
    }
    results: dict[str, Any] = {}
    with LLM(arguments.model, **settings) as llm:
        for num_rows in arguments.rows:
            rows = Rows(llm, num_rows)
            rows.rate({}, 16)
            results[str(num_rows)] = measure(rows, arguments.output_tokens)
            for kind, one in results[str(num_rows)].items():
                rate, ratio = one["tokens_per_second"], one["to_plain"]
                print(f"{num_rows:4} rows  {kind:24} {rate:10,.1f} tok/s  {ratio:.3f}", flush=True)
    if arguments.out is not None:
        record = {
            "benchmark": "sampling_over_ranks",
            "model": arguments.model,
            "ranks": arguments.ranks,
            "rows": results,
            "environment": describe_environment(),
        }
        write_record(arguments.out, record)


if __name__ == "__main__":
    main()
