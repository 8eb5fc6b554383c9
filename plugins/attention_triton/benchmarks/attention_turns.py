"""Microseconds of short prompts behind long contexts on one GPU, split and whole.

    python benchmarks/attention_turns.py [--out FILE]

bf16, blocks of 256 tokens; by heads of 128 numbers, or over latent rows of 512 + 64. Both ways are
checked against each other, and timed as CALLS calls in a captured CUDA graph behind one plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_decode import best_time

from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_bench.environment import describe_environment
from nanovllm_kit.attention_checks import run_prefill
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case
from nanovllm_kit.paged_attention import PagedCase, make_case

CALLS = 8
HEADS = ((16, 8), (32, 8), (32, 4), (16, 2), (16, None))
"""Query heads and KV heads; None: latent rows."""
TURNS = (
    (1, 100, 0),
    (1, 500, 0),
    (1, 16, 2000),
    (1, 100, 2000),
    (4, 100, 4000),
    (1, 16, 16_000),
    (1, 100, 16_000),
    (1, 500, 16_000),
    (1, 16, 64_000),
)
"""Sequences, queries of each, and keys before them."""
COPY_RATE, OPERATIONS = 4.2e12, 600e12
"""Bytes and operations per second that an H200 reaches at best here, for the floor."""
UNSPLIT = TritonOptions(chunk_size=256)
"""Decode in chunks of a fixed length has prompts whole."""


def make_turn(turn: tuple[int, int, int], heads: tuple[int, int | None]) -> PagedCase:
    num_seqs, num_queries, context = turn
    lens = [num_queries] * num_seqs, [context + num_queries] * num_seqs
    options: dict[str, Any] = {"block_size": 256, "dtype": torch.bfloat16, "device": "cuda"}
    if heads[1] is None:
        return make_latent_case(lens[1], LatentSizes(), lens[0], num_heads=heads[0], **options)
    return make_case(*lens, num_heads=heads[0], num_kv_heads=heads[1], head_size=128, **options)


def floor_seconds(case: PagedCase) -> float:
    """Keys and values read once, or the operations of each query and key that it sees."""
    num_heads, row, value = case.q_THD.shape[1], case.k_cache.shape[-1], case.v_cache.shape[-1]
    is_latent = row != value
    numbers = case.k_cache.shape[2] * (row if is_latent else row + value)
    pairs = sum(
        queries * (keys - queries) + queries * (queries + 1) // 2
        for queries, keys in zip(case.query_lens, case.seq_lens, strict=True)
    )
    operations = 2 * pairs * num_heads * (row + value)
    return max(sum(case.seq_lens) * numbers * 2 / COPY_RATE, operations / OPERATIONS)


def seconds(call: Callable[[], None]) -> float:
    """Of one call, the best of five replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return best_time(graph.replay, repeats=5) / CALLS


def measure(case: PagedCase) -> dict[str, float]:
    """Microseconds of a layer, split and whole, of the plan, and of the floor."""
    times, results = {}, []
    metadata = case.prefill_metadata()
    for name, options in (("split", TritonOptions()), ("whole", UNSPLIT)):
        backend = TritonAttention(options, case.config())
        backend.allocate()
        results.append(run_prefill(backend, case))
        out = case.new_out()

        def layer(backend: TritonAttention = backend, out: torch.Tensor = out) -> None:
            backend.run_prefill(case.q_THD, case.k_cache, case.v_cache, metadata, out)

        times[name] = seconds(layer)
        if name == "split":
            times["plan"] = seconds(lambda backend=backend: backend.plan_prefill(metadata))
    split, whole = (result.double() for result in results)
    error = ((split - whole).norm() / whole.norm()).item()
    if not error < 1e-2:
        raise SystemExit(f"split and whole differ: relative error {error:.1e}")
    return {
        name: round(1e6 * time, 1)
        for name, time in (times | {"floor": floor_seconds(case)}).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Short prompts behind long contexts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for heads in HEADS:
        for turn in TURNS:
            torch.manual_seed(0)
            row = {"heads": heads, "turn": turn, **measure(make_turn(turn, heads))}
            print(row, flush=True)
            rows.append(row)
    if arguments.out:
        result = {"turns": rows, "environment": describe_environment()}
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
