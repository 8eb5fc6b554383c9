"""Throughput of prompts of latent attention on one GPU: packed keys of 192 and values of 128.

    python benchmarks/latent_prompts.py [--shipped] [--out FILE]

bf16, 16 heads. Whole prompts are causal; a context is seen whole, and gives its log-sum-exp. The
kernel for Hopper, where it can serve, stands first. The last queries of every configuration are
checked against float64 before it is timed, as CALLS calls in a captured CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_decode import best_time
from torch import Tensor

from nanovllm_attention_triton.hopper_packed import (
    HopperPlan,
    hopper_packed_serves,
    run_hopper_packed,
)
from nanovllm_attention_triton.packed import packed_prefill
from nanovllm_attention_triton.prefill_tuning import PACKED, PackedTuning

HEADS, KEY_SIZE, VALUE_SIZE = 16, 192, 128
DTYPE = torch.bfloat16
SCALE = KEY_SIZE**-0.5
CALLS = 8
PROMPTS = ((64, 512), (8, 2048), (1, 8192), (1, 16384))
CONTEXTS = ((4, 512, 4096), (1, 16384, 16384))
"""Sequences, queries and keys of each."""
CHECKED = 512
"""Queries at most."""
SHIPPED = PACKED[DTYPE.itemsize]
SWEEP = (
    SHIPPED,
    replace(SHIPPED, num_stages=2),
    *(
        replace(SHIPPED, block_m=64, block_n=n, num_warps=4, num_stages=stages)
        for n, stages in ((64, 2), (64, 3), (32, 3))
    ),
    replace(SHIPPED, block_m=128, block_n=128, num_warps=8, num_stages=2),
)


@dataclass
class Prompts:
    """Sequences of equal lengths, packed."""

    name: str
    query_len: int
    key_len: int
    causal: bool
    q_THD: Tensor  # noqa: N815 - shape suffix
    k_LHD: Tensor  # noqa: N815 - shape suffix
    v_LHV: Tensor  # noqa: N815 - shape suffix
    query_start_loc: Tensor
    key_start_loc: Tensor
    out_THV: Tensor  # noqa: N815 - shape suffix
    lse_HT: Tensor | None  # noqa: N815 - shape suffix
    plan: HopperPlan

    @property
    def flops(self) -> int:
        """Two products, 2 operations per multiply-add; half of a square where it is causal."""
        pairs = len(self.q_THD) * self.key_len // (2 if self.causal else 1)
        return 2 * pairs * HEADS * (KEY_SIZE + VALUE_SIZE)

    def run_plain(self, tuning: PackedTuning) -> None:
        packed_prefill(
            self.q_THD,
            self.k_LHD,
            self.v_LHV,
            self.query_start_loc,
            self.key_start_loc,
            self.query_len,
            SCALE,
            self.causal,
            self.out_THV,
            tuning,
            self.lse_HT,
        )

    def run_hopper(self) -> None:
        run_hopper_packed(
            self.q_THD,
            self.k_LHD,
            self.v_LHV,
            self.query_start_loc,
            self.key_start_loc,
            len(self.q_THD),
            SCALE,
            self.causal,
            self.out_THV,
            self.lse_HT,
            self.plan,
        )

    def relative_error(self) -> float:
        """Of the last sequence's last queries, against float64."""
        queries = min(self.query_len, CHECKED)
        q, k, v = (
            x[-count:].double().transpose(0, 1)
            for x, count in (
                (self.q_THD, queries),
                (self.k_LHD, self.key_len),
                (self.v_LHV, self.key_len),
            )
        )
        scores = q @ k.transpose(1, 2) * SCALE
        if self.causal:
            unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + self.key_len - queries)
            scores.masked_fill_(unseen, float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        difference = self.out_THV[-queries:].double() - expected
        return (difference.norm() / expected.norm()).item()


def make_prompts(num_seqs: int, query_len: int, key_len: int | None = None) -> Prompts:
    """Whole prompts, or queries behind a context of `key_len`."""
    keys = key_len or query_len

    def random(tokens: int, size: int) -> Tensor:
        return torch.randn(num_seqs * tokens, HEADS, size, dtype=DTYPE, device="cuda")

    def starts(length: int) -> Tensor:
        return torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length

    q = random(query_len, KEY_SIZE)
    out = q.new_full((len(q), HEADS, VALUE_SIZE), float("nan"))
    lse = None if key_len is None else torch.empty(HEADS, len(q), device="cuda")
    key_lens = torch.full((num_seqs,), keys, dtype=torch.int32, device="cuda")
    return Prompts(
        name=f"{num_seqs}x{query_len}" + (f" of {key_len}" if key_len else ""),
        query_len=query_len,
        key_len=keys,
        causal=key_len is None,
        q_THD=q,
        k_LHD=random(keys, KEY_SIZE),
        v_LHV=random(keys, VALUE_SIZE),
        query_start_loc=starts(query_len),
        key_start_loc=starts(keys),
        out_THV=out,
        lse_HT=lse,
        plan=HopperPlan(key_lens, keys, torch.zeros(1, dtype=torch.int32, device="cuda")),
    )


def teraflops(prompts: Prompts, call: Callable[[], object]) -> float:
    """TFLOP/s of CALLS calls in one graph, best of 5 replays."""
    call()
    torch.cuda.synchronize()
    error = prompts.relative_error()
    if not error < 4e-3:
        raise SystemExit(f"{prompts.name}: relative error {error:.2e}: not timing it")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return CALLS * prompts.flops / best_time(graph.replay, repeats=5) / 1e12


def describe(tuning: PackedTuning) -> str:
    return f"{tuning.block_m}x{tuning.block_n}/{tuning.num_warps}/{tuning.num_stages}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts of latent attention, TFLOP/s")
    parser.add_argument("--shipped", action="store_true", help="no other than shipped constants")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    start = time.monotonic()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    batches = [make_prompts(*shape) for shape in (*PROMPTS, *CONTEXTS)]
    print(f"{'TFLOP/s':16s}" + " ".join(f"{batch.name:>14s}" for batch in batches))
    rows: list[dict[str, Any]] = []
    kernels: list[tuple[str, Callable[[Prompts], None]]] = [
        (describe(tuning), partial(Prompts.run_plain, tuning=tuning))
        for tuning in (SWEEP[:1] if arguments.shipped else SWEEP)
    ]
    if hopper_packed_serves(torch.device("cuda"), DTYPE, KEY_SIZE, VALUE_SIZE):
        kernels.insert(0, ("hopper", Prompts.run_hopper))
    for name, run in kernels:
        try:
            rates = [teraflops(batch, partial(run, batch)) for batch in batches]
        except Exception as error:  # one that does not compile is a row of the table
            print(f"{name:16s}{type(error).__name__}: {str(error)[:80]}")
            continue
        print(f"{name:16s}" + " ".join(f"{rate:14.0f}" for rate in rates), flush=True)
        named = {batch.name: rate for batch, rate in zip(batches, rates, strict=True)}
        rows.append({"kernel": name, "tflop_per_s": named})
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.out:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
