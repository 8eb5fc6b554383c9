"""What attention of a decode step costs between its products, prepared by its own kernel or inside.

    python benchmarks/attention_from_qkv.py [--shapes 0.6B 8B] [--tunings] [--seconds 60] \
        [--out FILE]

A graph holds one plan and several layers: the product that makes q, k, v, attention, and the
product behind it, each layer over weights and a cache of its own, more of them than the L2 holds,
with dependent launch as in an engine. It prints µs per layer beyond those of the products alone,
without the kernel of few rows: preparation and decode as two kernels, and as one, with the products
of an engine, whose difference counts. Needs nanovllm-kernels-triton. Outputs of the two are
compared before either is timed. `--tunings` times candidates of the constants for one row in one
kernel instead, in steps whose grids are those of an engine for long contexts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_triton import decode
from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.decode_tuning import DECODE_FEW, DecodeTuning
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_core.api import AttentionConfig, DecodeMetadata, QKPrep
from nanovllm_core.kernels import supports_dependent_launch
from nanovllm_kernels_triton.few_rows import has_few_rows_kernel
from nanovllm_kernels_triton.kernel_set import TritonKernels

BLOCK_SIZE, MAX_LEN, MAX_ROWS = 256, 4352, 256
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
LAYER_BYTES = 120 * 2**20
"""Weights of all layers of a graph at least: more than the L2 holds."""
BATCHES = (
    *((1, 512), (1, 4096), (2, 1024), (5, 512), (8, 512), (8, 4096)),
    *((16, 512), (33, 1024), (64, 1024), (256, 1024)),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Hidden size, query heads, KV heads and head size of a model's layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def packed(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def layers(self) -> int:
        weights = 2 * self.hidden * (self.packed + self.heads * self.head_size)
        return max(3, -(-LAYER_BYTES // weights))


SHAPES = {
    "0.6B": Shape(1024, 16, 8, 128),
    "8B": Shape(4096, 32, 8, 128),
    "32B": Shape(5120, 64, 8, 128),
    "llama 1B": Shape(2048, 32, 8, 64),
    "30B-A3B": Shape(2048, 32, 4, 128),
}
LONG_LEN = 40960
ONE_ROW = (512, 768, 4096, 32768)
"""Contexts of one row for which candidates are timed."""
MERGE = decode.QKV_MERGE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Candidate:
    """Constants of decode, and how many partial results a program merges at a time."""

    tuning: DecodeTuning
    merge: int = MERGE


def candidates() -> Mapping[str, Candidate]:
    """Those for few rows; then more warps, longer chunks, and fewer query heads for a program.

    The shipped constants of each group size are among them.
    """
    few = DECODE_FEW[2]
    four, long = replace(few, num_warps=4), replace(few, min_chunk=64)
    four_long = replace(four, min_chunk=64)
    return {
        "as for few rows": Candidate(few),
        "4 warps": Candidate(four),
        "4 warps, merge twice": Candidate(four, 2 * MERGE),
        "chunks of 64": Candidate(long),
        "4 warps, chunks of 64": Candidate(four_long),
        "4 warps, chunks of 64, merge twice": Candidate(four_long, 2 * MERGE),
        "4 warps, tiles of 64": Candidate(replace(four_long, tile=64, num_stages=2)),
        "4 heads": Candidate(replace(few, most_heads=4)),
        "2 heads": Candidate(replace(few, most_heads=2)),
        "4 heads, chunks of 64": Candidate(replace(long, most_heads=4)),
        "2 heads, chunks of 64": Candidate(replace(long, most_heads=2)),
        "4 heads, 4 warps": Candidate(replace(four, most_heads=4)),
    }


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE) * scale


class Layers:
    """The weights of the layers of one shape, their backend, and one batch at a time."""

    def __init__(self, shape: Shape, max_len: int = MAX_LEN) -> None:
        self.shape, self.max_len = shape, max_len
        self.kernels = TritonKernels(
            dependent_launch=supports_dependent_launch(DEVICE),
            few_rows=has_few_rows_kernel(DEVICE),
        )
        width = shape.heads * shape.head_size
        self.weights = [
            (randn(shape.packed, shape.hidden, scale=shape.hidden**-0.5),
             randn(shape.hidden, width, scale=0.1 * width**-0.5))
            for _ in range(shape.layers)
        ]  # fmt: skip
        self.norm = 1 + randn(shape.hidden, scale=0.1)
        self.prep = QKPrep(
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            cos_sin_cache=torch.randn(max_len, shape.head_size, device=DEVICE),
            q_norm_weight=1 + randn(shape.head_size, scale=0.1),
            k_norm_weight=1 + randn(shape.head_size, scale=0.1),
        )
        config = AttentionConfig(
            device=DEVICE,
            dtype=DTYPE,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_ROWS,
            max_model_len=max_len,
            max_num_batched_tokens=8192,
        )
        self.config = config
        self.use(None)

    def use(self, candidate: Candidate | None) -> None:
        """Attend by the constants of a candidate, or by those that ship."""
        self.backend = TritonAttention(TritonOptions(), self.config)
        decode.QKV_MERGE_ELEMENTS = candidate.merge if candidate else MERGE
        if candidate:
            self.backend.decode_tunings = [(MAX_ROWS, candidate.tuning)]
        self.backend.allocate()

    def set_batch(self, rows: int, context: int) -> None:
        """Rows of about `context` keys, whose blocks are shuffled."""
        shape = self.shape
        per_row = -(-context // BLOCK_SIZE)
        cache = rows * per_row, BLOCK_SIZE, shape.kv_heads, shape.head_size
        self.caches = [(randn(*cache), randn(*cache)) for _ in self.weights]
        table = torch.zeros(rows, self.max_len // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
        blocks = torch.randperm(rows * per_row, device=DEVICE).int()
        table[:, :per_row] = blocks.view(rows, per_row)
        lens = torch.tensor([context - 7 * row % 64 for row in range(rows)], device=DEVICE).int()
        self.positions = lens - 1
        last = table.gather(1, (self.positions // BLOCK_SIZE).long()[:, None])[:, 0].long()
        self.slots = last * BLOCK_SIZE + self.positions.long() % BLOCK_SIZE
        self.metadata = DecodeMetadata(table, lens, max_seq_len=self.max_len)
        self.x = randn(rows, shape.hidden)
        self.attended = randn(rows, shape.heads, shape.head_size)

    def step(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """All layers; `attend` makes a layer's output of qkv and its cache."""
        self.backend.plan_decode(self.metadata)
        x, outputs = self.x.clone(), []
        for (w_qkv, w_out), (k_cache, v_cache) in zip(self.weights, self.caches, strict=True):
            qkv = self.kernels.norm_linear(x, self.norm, 1e-6, w_qkv)
            outputs.append(attend(qkv, k_cache, v_cache))
            x = self.kernels.linear_add(outputs[-1].flatten(1), w_out, x)
        return outputs

    def products_alone(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return self.attended

    def in_two_kernels(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = self.kernels.prepare_qkv(qkv, self.prep, self.positions, self.slots, k_cache, v_cache)
        out = torch.empty_like(q)
        self.backend.run_decode(q, k_cache, v_cache, self.metadata, out)
        return out

    def in_one_kernel(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(self.attended)
        self.backend.run_decode_from_qkv(
            qkv, self.prep, self.positions, self.slots, k_cache, v_cache, self.metadata, out
        )
        return out


def microseconds(layers: Layers, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Per layer, of the best of five rounds of replays."""
    layers.kernels.announce_prepared_decode(MAX_ROWS if attend == layers.in_one_kernel else 0)
    layers.step(attend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.step(attend)
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(6):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / 6 / len(layers.weights))
    return min(times[1:])


def check(layers: Layers, name: str) -> None:
    """The first layer's outputs agree, whose inputs are the same, by the same product."""
    layers.kernels.announce_prepared_decode(0)
    first, second = (
        layers.step(attend)[0].float() for attend in (layers.in_two_kernels, layers.in_one_kernel)
    )
    error = ((first - second).norm() / first.norm()).item()
    if not error < 4e-3:
        raise SystemExit(f"{name}: the two differ by {error:.2e}: not timing them")


def bench_shape(name: str, deadline: float) -> list[dict[str, Any]]:
    layers, rows_of_table = Layers(SHAPES[name]), []
    print(f"\n{name}: µs per layer\n{'batch':>12s}  products   + two kernels   + one kernel")
    for rows, context in BATCHES:
        if time.monotonic() > deadline:
            print("time is up: the rest is left out")
            break
        layers.set_batch(rows, context)
        check(layers, f"{name} {rows}x{context}")
        alone, two, one = (
            microseconds(layers, attend)
            for attend in (layers.products_alone, layers.in_two_kernels, layers.in_one_kernel)
        )
        print(f"{f'{rows}x{context}':>12s}{alone:10.2f}{two - alone:16.2f}{one - alone:15.2f}")
        rows_of_table.append(
            {"shape": name, "rows": rows, "context": context, "products_us": alone,
             "two_kernels_us": two - alone, "one_kernel_us": one - alone}
        )  # fmt: skip
    return rows_of_table


def bench_tunings(name: str, deadline: float) -> list[dict[str, Any]]:
    """One row by each candidate: µs per layer beyond those of the products."""
    rows_of_table: list[dict[str, Any]] = []
    layers = Layers(SHAPES[name], LONG_LEN)
    layers.set_batch(1, ONE_ROW[0])
    with layers.kernels.compile_ahead():
        for candidate in candidates().values():
            layers.use(candidate)
            layers.step(layers.in_one_kernel)
    print(f"\n{name}, one row in one kernel: µs per layer\n{'keys':>8s}" + " candidates")
    for context in ONE_ROW:
        layers.set_batch(1, context)
        layers.use(None)
        alone = microseconds(layers, layers.products_alone)
        shipped = layers.step(layers.in_one_kernel)[0].float()
        for what, candidate in candidates().items():
            if time.monotonic() > deadline:
                print("time is up: the rest is left out")
                return rows_of_table
            layers.use(candidate)
            first = layers.step(layers.in_one_kernel)[0].float()
            error = ((first - shipped).norm() / shipped.norm()).item()
            time_us = microseconds(layers, layers.in_one_kernel) - alone
            print(f"{context:8d}{time_us:9.2f}  {what} (differs by {error:.1e})", flush=True)
            rows_of_table.append(
                {"shape": name, "context": context, "candidate": what, "us": time_us,
                 "products_us": alone, "differs": error}
            )  # fmt: skip
    return rows_of_table


def main() -> None:
    parser = argparse.ArgumentParser(description="Preparation and decode between products, µs")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tunings", action="store_true", help="candidates for one row instead")
    parser.add_argument("--seconds", type=float, default=60, help="start nothing after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bench = bench_tunings if arguments.tunings else bench_shape
    rows = [row for name in arguments.shapes for row in bench(name, deadline)]
    if arguments.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
