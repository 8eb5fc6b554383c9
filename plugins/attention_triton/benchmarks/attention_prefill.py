"""Prefill throughput of the Triton backend on one GPU, against torch's SDPA.

    python benchmarks/attention_prefill.py [--shipped] [--seconds 90] [--out FILE]

Causal, bf16, 16 query heads, 8 KV heads of size 128, over shuffled blocks. Every configuration is
first checked against float64 on ragged chunks whose unused slots hold NaN, and against torch on the
shapes that are timed. Times are those of CALLS calls in a captured CUDA graph: the host's share
would hide the kernels of short prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_decode import best_time
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_triton.prefill import prefill_attention
from nanovllm_attention_triton.prefill_tuning import PREFILL, PrefillTuning

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5
SHAPES = ((64, 512), (16, 1024), (4, 4096), (1, 8192), (8, 8192))
CALLS = 8
SHIPPED = PREFILL[DTYPE.itemsize]
BASE = replace(SHIPPED, warp_roles=False)
SWEEP = (
    SHIPPED,
    BASE,
    replace(BASE, copy_engine=False),
    replace(BASE, num_stages=2),
    replace(BASE, block_n=32, num_stages=3),
    replace(BASE, block_n=32, num_stages=4),
    *(
        replace(BASE, block_m=128, block_n=n, num_warps=8, num_stages=stages, copy_engine=engine)
        for n, stages, engine in (
            (64, 3, True),
            (64, 4, True),
            (128, 2, True),
            (128, 3, True),
            (128, 3, False),
        )
    ),
)


@dataclass
class Prompts:
    """Chunks of sequences, packed, and their keys and values in shuffled blocks, all else NaN."""

    lens: list[int]
    query_lens: list[int]
    q_THD: Tensor  # noqa: N815 - shape suffix
    k_LKD: Tensor  # noqa: N815 - shape suffix
    v_LKD: Tensor  # noqa: N815 - shape suffix
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out_THD: Tensor  # noqa: N815 - shape suffix

    @property
    def flops(self) -> int:
        """Of whole prompts: two products of half the square, 2 operations per multiply-add."""
        return sum(2 * length**2 * HEADS * HEAD_SIZE for length in self.lens)

    def run_triton(self, tuning: PrefillTuning) -> None:
        """Our kernel, into `out_THD`."""
        prefill_attention(
            self.q_THD,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            max(self.query_lens),
            SCALE,
            self.out_THD,
            tuning,
        )

    def run_torch(self, kernel: SDPBackend) -> Tensor:
        """torch's SDPA of whole prompts of one length -> [batch, heads, length, head size]."""
        q, k, v = (
            x.view(len(self.lens), self.lens[0], -1, HEAD_SIZE).transpose(1, 2)
            for x in (self.q_THD, self.k_LKD, self.v_LKD)
        )
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def reference(self) -> Tensor:
        """Attention in float64, sequence by sequence -> [tokens, heads, head size]."""
        parts = []
        queries = self.q_THD.split(self.query_lens)
        keys, values = (x.split(self.lens) for x in (self.k_LKD, self.v_LKD))
        for q, k, v in zip(queries, keys, values, strict=True):
            mask = torch.ones(len(q), len(k), dtype=torch.bool, device="cuda")
            mask = mask.tril(len(k) - len(q))
            dense = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
            out = scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


def make_prompts(seq_lens: list[int], query_lens: list[int], block_size: int) -> Prompts:
    def random(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, HEAD_SIZE, dtype=DTYPE, device="cuda")

    q = random(sum(query_lens), HEADS)
    k, v = (random(sum(seq_lens), KV_HEADS) for _ in range(2))
    counts = [-(-length // block_size) for length in seq_lens]
    blocks = torch.randperm(sum(counts), device="cuda").split(counts)
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32, device="cuda")
    shape = (sum(counts), block_size, KV_HEADS, HEAD_SIZE)
    caches = [torch.full(shape, float("nan"), dtype=DTYPE, device="cuda") for _ in range(2)]
    for row, mine in enumerate(blocks):
        table[row, : len(mine)] = mine
        tokens = torch.arange(seq_lens[row], device="cuda")
        for cache, packed in zip(caches, (k, v), strict=True):
            cache[mine[tokens // block_size], tokens % block_size] = packed.split(seq_lens)[row]
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    out = torch.full_like(q, float("nan"))
    return Prompts(seq_lens, query_lens, q, k, v, *caches, table, lens, starts, out)


def describe(tuning: PrefillTuning) -> str:
    if tuning.warp_roles:
        return "shipped (warp roles where they serve)"
    way = "copy engine" if tuning.copy_engine else "threads"
    return (
        f"{tuning.block_m}x{tuning.block_n} warps {tuning.num_warps} stages {tuning.num_stages} "
        f"{way}"
    )


def check(prompts: Prompts, expected: Tensor, tuning: PrefillTuning, limit: float) -> None:
    """End the benchmark if `tuning` computes anything else than `expected`."""
    prompts.out_THD.fill_(float("nan"))
    prompts.run_triton(tuning)
    difference = prompts.out_THD.double() - expected.double()
    error = (difference.norm() / expected.double().norm()).item()
    if not error < limit:
        raise SystemExit(f"{describe(tuning)}: relative error {error:.2e}: not timing it")


def teraflops(prompts: Prompts, call: Callable[[], object]) -> float:
    """TFLOP/s of CALLS calls in one graph, best of 5 replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return CALLS * prompts.flops / best_time(graph.replay, repeats=5) / 1e12


def usable(
    tunings: tuple[PrefillTuning, ...], block_size: int, deadline: float
) -> list[PrefillTuning]:
    """Of `tunings` those that compile, right on ragged chunks; a wrong one ends it all."""
    chunks = make_prompts([1000, 129, 64, 513, 300, 1], [300, 129, 1, 200, 300, 1], block_size)
    expected, found = chunks.reference(), []
    for tuning in tunings:
        if time.monotonic() > deadline:
            print("time is up: the rest of the configurations is left out")
            break
        try:
            chunks.run_triton(tuning)
        except Exception as error:  # one that does not compile is a line of the table
            print(f"{describe(tuning):40s} {type(error).__name__}: {str(error)[:80]}")
            continue
        check(chunks, expected, tuning, 4e-3)
        found.append(tuning)
    return found


def bench(block_size: int, tunings: list[PrefillTuning], with_torch: bool) -> list[dict[str, Any]]:
    """TFLOP/s by configuration and shape, a table as it is measured."""
    batches = [
        make_prompts([length] * batch, [length] * batch, block_size) for batch, length in SHAPES
    ]
    expected = [
        prompts.run_torch(SDPBackend.FLASH_ATTENTION).transpose(1, 2).flatten(0, 1)
        for prompts in batches
    ]
    runs: list[tuple[str, PrefillTuning | None, Callable[[Prompts], object]]] = []
    if with_torch:
        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            runs.append((f"torch {kernel.name}", None, partial(Prompts.run_torch, kernel=kernel)))
    runs += [(describe(t), t, partial(Prompts.run_triton, tuning=t)) for t in tunings]
    title = f"blocks of {block_size} tokens, causal, TFLOP/s"
    print(f"\n{title:40s}" + " ".join(f"{f'{b} x {n}':>9s}" for b, n in SHAPES))
    rows = []
    for name, tuning, run in runs:
        rates = []
        for prompts, right in zip(batches, expected, strict=True):
            if tuning is not None:
                check(prompts, right, tuning, 8e-3)
            rates.append(teraflops(prompts, partial(run, prompts)))
        print(f"{name:40s}" + " ".join(f"{rate:9.0f}" for rate in rates), flush=True)
        rows.append(
            {
                "block_size": block_size,
                "ran": name,
                "tuning": tuning and asdict(tuning),
                "tflop_per_s": {f"{b}x{n}": r for (b, n), r in zip(SHAPES, rates, strict=True)},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill TFLOP/s")
    parser.add_argument("--seconds", type=float, default=60, help="stop compiling after this long")
    parser.add_argument("--shipped", action="store_true", help="the shipped configuration alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    start = time.monotonic()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sweep = (SHIPPED,) if arguments.shipped else SWEEP
    tunings = usable(sweep, 256, start + arguments.seconds)
    rows = bench(256, tunings, with_torch=not arguments.shipped)
    ours = [row for row in rows if row["tuning"]]
    best = max(ours, key=lambda row: sum(row["tflop_per_s"].values()))
    rows += bench(16, [PrefillTuning(**best["tuning"])], with_torch=False)
    print(f"\nbest by the sum of the shapes: {best['ran']}; {time.monotonic() - start:.0f} s")
    if arguments.out:
        device = torch.cuda.get_device_name()
        result = {"device": device, "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
