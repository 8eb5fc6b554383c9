"""Which kernel computes a layer's product, by rows, shape and dtype: one rule, in one place.

With few rows a product takes as long as its weight takes to stream, and cuBLAS is far from that;
with many rows cuBLAS is better than these kernels. `benchmarks/linears.py` measures every candidate
beside cuBLAS; its table, measured on an H200, is what the numbers below are set from.

| rows | dtype | kernel |
|---|---|---|
| 1 .. VECTOR_ROWS | any | vector: whole weight rows in registers |
| .. TILE_ROWS | float16, bfloat16 | tile: tensor cores, the inputs split where outputs are few |
| all others, or MAX_OUTPUTS exceeded | any | cuBLAS, norm and activation as kernels of their own |

Whole rows of more than MAX_VECTOR_INPUTS take the line below; so does float32 from 3 rows on.

These kernels add no bias: a product with one takes the last line, whatever its rows. One that is
added to the residual takes its line, and the bias a kernel of its own behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

VECTOR_ROWS = 2
TILE_ROWS = 64
MAX_VECTOR_INPUTS = 16384
"""Whole rows longer than this do not fit a program's registers."""
MAX_OUTPUTS = 65536
"""An output head is long enough to stream well in cuBLAS too."""

_PROGRAMS = 132
"""Programs that fill a GPU: the multiprocessors of an H100 or H200. A guide, not a limit."""

_WIDE_OUTPUTS = 4096
"""Outputs that make enough programs of 64."""
_VECTOR_WEIGHTS = 8192
"""Weights of a vector program, where that makes enough rows."""
_WARP_BYTES = 8192
"""Of weights in the registers of a warp, all in flight at once: 64 registers of each thread."""


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """`block_n` weight rows per program."""

    block_n: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """`block_n` weight rows by `block_k` inputs per step; `splits` programs share the inputs."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


LinearPlan = VectorPlan | TilePlan


@lru_cache(maxsize=1024)
def choose(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> LinearPlan | None:
    """The plan for x [rows, inputs] by a weight [outputs, inputs]; None means cuBLAS.

    Of a gated pair, `outputs` counts gate and up.
    """
    if rows < 1 or rows > max(VECTOR_ROWS, TILE_ROWS) or outputs > MAX_OUTPUTS:
        return None
    if rows <= VECTOR_ROWS and inputs <= MAX_VECTOR_INPUTS:
        return _vector_plan(inputs, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return _tile_plan(outputs, inputs)
    return None


def _vector_plan(inputs: int, dtype: torch.dtype) -> VectorPlan:
    padded = 1 << (inputs - 1).bit_length()
    block_n = min(max(_VECTOR_WEIGHTS // padded, 4 if padded <= 4096 else 2), 16)
    return VectorPlan(block_n, max(block_n * padded * dtype.itemsize // _WARP_BYTES, 1))


def _tile_plan(outputs: int, inputs: int) -> TilePlan:
    """Wide tiles where there are outputs enough for them; else narrow ones, with the inputs split.

    As many equal parts as give every multiprocessor a program, but at least two steps to each: the
    loads of a single one would not be pipelined.
    """
    if outputs >= _WIDE_OUTPUTS:
        return TilePlan(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=4)
    tiles, steps = -(-outputs // 32), -(-inputs // 256)
    most = max(min(_PROGRAMS // tiles, steps // 2), 1)
    splits = max(parts for parts in range(1, most + 1) if steps % parts == 0)
    return TilePlan(block_n=32, block_k=256, splits=splits, num_warps=4, num_stages=3)
