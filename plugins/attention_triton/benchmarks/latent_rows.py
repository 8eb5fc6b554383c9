"""Microseconds and TFLOP/s of prompts over latent rows on one GPU, as in captured steps.

    python benchmarks/latent_rows.py [--shipped] [--out FILE]

bf16, rows of 512 + 64 numbers in blocks of 256 tokens. Every configuration is checked against
float64 before it is timed, as CALLS calls in a captured CUDA graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_decode import best_time

from nanovllm_attention_triton.latent_prefill import latent_prefill
from nanovllm_attention_triton.prefill_tuning import (
    HOPPER_LATENT_PREFILL,
    LATENT_PREFILL,
    PackedTuning,
)
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case
from nanovllm_kit.paged_attention import PagedCase

DEVICE = "cuda"
CALLS = 8
STEPS = (
    (1, 128, 0, 16),
    (1, 128, 2000, 16),
    (1, 512, 0, 16),
    (1, 512, 4000, 16),
    (8, 256, 1000, 16),
    (1, 512, 1000, 128),
)
"""Sequences, queries of each, keys before them, and heads."""
SWEEP = (*(one for _, one in HOPPER_LATENT_PREFILL), LATENT_PREFILL[2])


def make_step(num_seqs: int, num_queries: int, context: int, num_heads: int) -> PagedCase:
    return make_latent_case(
        [context + num_queries] * num_seqs,
        LatentSizes(),
        [num_queries] * num_seqs,
        num_heads=num_heads,
        block_size=256,
        dtype=torch.bfloat16,
        device=DEVICE,
    )


def flops(step: PagedCase) -> int:
    """Two products of every query head and each key that it sees."""
    row, value = step.k_cache.shape[-1], step.v_cache.shape[-1]
    pairs = sum(
        queries * (keys - queries) + queries * (queries + 1) // 2
        for queries, keys in zip(step.query_lens, step.seq_lens, strict=True)
    )
    return 2 * pairs * step.q_THD.shape[1] * (row + value)


def seconds(call: Callable[[], None]) -> float:
    """Of one call, the best of five replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return best_time(graph.replay, repeats=5) / CALLS


def measure(step: PagedCase, tuning: PackedTuning | None) -> float:
    """Microseconds; AssertionError where the result is wrong."""
    metadata, out = step.prefill_metadata(), step.new_out()
    call = partial(latent_prefill, step.q_THD, step.k_cache, metadata, step.scale, out, tuning)
    call()
    step.assert_close(out)
    return 1e6 * seconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts over latent rows")
    parser.add_argument("--shipped", action="store_true", help="no other than shipped constants")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for num_seqs, num_queries, context, num_heads in STEPS:
        step = make_step(num_seqs, num_queries, context, num_heads)
        name = f"{num_seqs} x {num_queries} behind {context}, {num_heads} heads"
        for tuning in (None,) if arguments.shipped else SWEEP:
            time = measure(step, tuning)
            tiles = f"{tuning.block_m} x {tuning.block_n}" if tuning else "shipped"
            rate = flops(step) / time / 1e6
            print(f"{name:32s} {tiles:8s} {time:8.1f} us {rate:5.0f} TFLOP/s", flush=True)
            rows.append({"step": name, "tuning": tuning and asdict(tuning), "us": round(time, 1)})
    if arguments.out:
        environment = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.out.write_text(json.dumps({**environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
