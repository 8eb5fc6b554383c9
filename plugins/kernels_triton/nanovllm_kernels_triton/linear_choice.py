"""Which kernel computes a layer's product, by rows, shape and dtype: one rule, in one place.

With few rows a product takes as long as its weight takes to stream, and cuBLAS is far from that;
with many rows cuBLAS is better than these kernels. `benchmarks/linears.py` measures every candidate
beside cuBLAS; its table, measured on an H200, is what the numbers below are set from.

| rows | dtype | kernel |
|---|---|---|
| 1; 2 where the weight is small, or in float32 | any | vector: whole weight rows in registers |
| .. TILE_ROWS | float16, bfloat16 | tile: tensor cores, the inputs split where outputs are few |
| all others, or MAX_OUTPUTS exceeded | any | cuBLAS, norm and activation as kernels of their own |

Rows of a weight of more than MAX_VECTOR_BYTES take the line below; so does float32 from 3 rows on.

These kernels add no bias: a product with one takes the last line, whatever its rows. One that is
added to the residual takes its line, and the bias a kernel of its own behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

VECTOR_ROWS = 2
TILE_ROWS = 64
MAX_VECTOR_BYTES = 65536
"""Longer rows of a weight do not fit a program's registers."""
MAX_TWO_ROW_WEIGHTS = 2**23
"""With two rows the vector kernel is bound by arithmetic, which a short stream hides."""
MAX_OUTPUTS = 65536
"""An output head is long enough to stream well in cuBLAS too."""

_PROGRAMS = 132
"""Programs that fill a GPU: the multiprocessors of an H100 or H200. A guide, not a limit."""

_WIDE_OUTPUTS = 2560
"""Outputs for which tiles of 64 are narrow enough."""
_WHOLE_TILES = 96
"""So many tiles are not split: the exchange of parts costs more than idle multiprocessors."""
_PART_STEPS = 8
"""Steps of a wide tile that pay for the exchange of a part."""
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
    if rows < 1 or rows > TILE_ROWS or outputs > MAX_OUTPUTS:
        return None
    half = dtype in (torch.float16, torch.bfloat16)
    most_rows = 1 if half and outputs * inputs > MAX_TWO_ROW_WEIGHTS else VECTOR_ROWS
    if rows <= most_rows and inputs * dtype.itemsize <= MAX_VECTOR_BYTES:
        return _vector_plan(inputs, dtype)
    if not half:
        return None
    if outputs < _WIDE_OUTPUTS:
        return _narrow_tile_plan(rows, outputs, inputs)
    return _wide_tile_plan(rows, outputs, inputs)


def _vector_plan(inputs: int, dtype: torch.dtype) -> VectorPlan:
    padded = 1 << (inputs - 1).bit_length()
    block_n = min(max(_VECTOR_WEIGHTS // padded, 4 if padded <= 4096 else 2), 16)
    return VectorPlan(block_n, max(block_n * padded * dtype.itemsize // _WARP_BYTES, 1))


def _narrow_tile_plan(rows: int, outputs: int, inputs: int) -> TilePlan:
    """As many parts as give every multiprocessor a program.

    At least two steps to a part, or the loads of a single one would not be pipelined. Above 32
    rows x is the wide operand, and steps are shorter, so that four fit in shared memory.
    """
    block_k, num_stages, least = (256, 3, 2) if rows <= 32 else (128, 4, 4)
    splits = _splits(_PROGRAMS, -(-outputs // 32), -(-inputs // block_k), least=least)
    return TilePlan(32, block_k, splits, num_warps=4, num_stages=num_stages)


def _wide_tile_plan(rows: int, outputs: int, inputs: int) -> TilePlan:
    """A whole number of programs for each multiprocessor, all of them resident at once.

    To 32 rows two programs of four stages fit in the shared memory of a multiprocessor, or three of
    less; above, one program, two with three stages, or three with steps of half the inputs.
    """
    tiles, steps = -(-outputs // 64), -(-inputs // 128)
    few_rows = rows <= 32
    block_k, splits, num_stages = 128, 1, 4
    if tiles < _WHOLE_TILES:
        per_processor = 1 if not few_rows and 2 * tiles <= _PROGRAMS else 2
        splits = _splits(per_processor * _PROGRAMS, tiles, steps, least=_PART_STEPS)
        num_stages = 4 if few_rows or tiles * splits <= _PROGRAMS else 3
    elif 2 * _PROGRAMS < tiles <= 3 * _PROGRAMS:
        block_k, num_stages = (128, 3) if few_rows else (64, 4)
    return TilePlan(block_n=64, block_k=block_k, splits=splits, num_warps=4, num_stages=num_stages)


def _splits(programs: int, tiles: int, steps: int, *, least: int) -> int:
    """Parts of a tile that make no more than `programs` of all, of at least so many steps each."""
    return max(min(programs // tiles, steps // least), 1)
