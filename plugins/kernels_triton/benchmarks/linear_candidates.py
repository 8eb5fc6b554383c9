"""The products of several models' layers, and the plans that are worth a measurement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm_kernels_triton.linear_choice import (
    FEW_ROWS,
    TILE_ROWS,
    WIDE_ROWS,
    FewRowsPlan,
    LinearPlan,
    TilePlan,
    VectorPlan,
)
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS

DTYPE = torch.bfloat16
BANDWIDTH = 4.3e12
"""Bytes per second that a copy reaches on an H200."""
MATMUL_RATE = 8e14
"""Operations per second, about, of a large product in bfloat16 there."""
SHARED_BYTES = 226 * 1024
"""Of a multiprocessor, for the stages of its programs."""
MODELS = {  # hidden size, inputs of o_proj, outputs of qkv, intermediate size
    "0.6B": (1024, 2048, 4096, 3072),
    "1.7B": (2048, 2048, 4096, 6144),
    "4B": (2560, 4096, 6144, 9728),
    "8B": (4096, 4096, 6144, 12288),
    "14B": (5120, 5120, 7168, 17408),
    "32B": (5120, 8192, 10240, 25600),
    "Llama-8B": (4096, 4096, 6144, 14336),
    "Qwen2.5-32B": (5120, 5120, 7168, 27648),
    "32B/2": (5120, 4096, 5120, 12800),  # of one of two ranks
    "32B/4": (5120, 2048, 2560, 6400),
}
WIDE_PLANS = tuple(
    TilePlan(block_n, block_k, 1, num_warps, num_stages)
    for block_n, block_k, num_warps, num_stages in (
        (64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 4, 3),
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4),
    )
)  # fmt: skip
POWERS = (1, 2, 4, 8, 16)
"""Rows, and warps, of a vector program."""


@dataclass(frozen=True)
class Product:
    """x [rows, inputs] by a weight [outputs, inputs]; `kind` says what is before and behind it."""

    name: str
    kind: str  # "norm", "gated" (with norm) or "add"
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Bytes of the weight."""
        return self.inputs * self.outputs * DTYPE.itemsize


def products(model: str) -> tuple[Product, ...]:
    hidden, attended, qkv, intermediate = MODELS[model]
    return (
        Product("norm + qkv", "norm", hidden, qkv),
        Product("o_proj + residual", "add", attended, hidden),
        Product("norm + gate_up + silu", "gated", hidden, 2 * intermediate),
        Product("down + residual", "add", intermediate, hidden),
    )


def floor_of(size: float, rows: int) -> float:
    """Microseconds to stream a weight of so many bytes, or to multiply so many rows by it."""
    operations = 2 * rows * size / DTYPE.itemsize
    return max(size / BANDWIDTH, operations / MATMUL_RATE) * 1e6


def candidates(product: Product, rows: int) -> Iterator[LinearPlan]:
    """Plans worth a measurement: 32 to 128 weights a thread, or 192 of rows that are not padded; up
    to three programs a processor.

    Above TILE_ROWS of gate and up alone, and none above WIDE_ROWS.
    """
    if rows > TILE_ROWS:
        if rows <= WIDE_ROWS and product.kind == "gated":
            yield from WIDE_PLANS
        return
    padded = 1 << (product.inputs - 1).bit_length()
    if rows <= 2:
        rest = 1 << (product.inputs - padded // 2 - 1).bit_length()
        held_by_rest = {0: padded} | ({rest: padded // 2 + rest} if rest < padded // 2 else {})
        for rest, block_n, num_warps in itertools.product(held_by_rest, POWERS, POWERS):
            per_thread = block_n * held_by_rest[rest] // (32 * num_warps)
            if block_n > (product.kind == "gated") and 32 <= per_thread <= (192 if rest else 128):
                yield VectorPlan(block_n, num_warps, rest)
    if 2 <= rows <= FEW_ROWS:
        for num_warps, held in itertools.product((4, 8), (4, 6)):
            steps = -(-product.inputs // (64 * num_warps))
            yield FewRowsPlan(num_warps, min(steps, held))
    yield from dict.fromkeys(_tile_plans(product, max(16, 1 << (rows - 1).bit_length())))


def _tile_plans(product: Product, block_m: int) -> Iterator[TilePlan]:
    count, steps = -(-product.outputs // 64), -(-product.inputs // 128)
    if count >= 96:
        for per_processor in (1, 2, 3):
            yield from _tile_plan(64, 128, 1, block_m, per_processor)
        if block_m == 64:
            yield from _tile_plan(64, 64, 1, block_m, 3)
            yield from _tile_plan(128, 64, 1, block_m, 2)
            yield from _tile_plan(128, 128, 1, block_m, 1)
        if count < MULTIPROCESSORS:
            yield from _tile_plan(64, 128, 2, block_m, 2)
        return
    for splits in (1, 2, 3, 4, 6, 8):
        if steps // splits >= 2 and count * splits <= 3 * MULTIPROCESSORS:
            per_processor = -(-count * splits // MULTIPROCESSORS)
            yield from _tile_plan(64, 128, splits, block_m, per_processor)
        if count < 40 and steps // splits >= 4 and count * splits <= MULTIPROCESSORS:
            yield from _tile_plan(32, 256 if block_m < 64 else 128, splits, block_m, 1)


def _tile_plan(
    block_n: int, block_k: int, splits: int, block_m: int, per_processor: int
) -> Iterator[TilePlan]:
    """With as many stages as so many resident programs have memory for, from two to four."""
    stage = (block_n + block_m) * block_k * DTYPE.itemsize
    num_stages = min(SHARED_BYTES // per_processor // stage, 4)
    if num_stages >= 2:
        num_warps = 8 if block_n == block_k == 128 else 4
        yield TilePlan(block_n, block_k, splits, num_warps, num_stages)
