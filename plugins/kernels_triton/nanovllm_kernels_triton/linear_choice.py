"""Which kernel computes a layer's product, by rows, shape and dtype: one rule, in one place.

That of few rows is used where the set knows that attention prepares q, k and v of so many.

With few rows a product takes as long as its weight takes to stream, and cuBLAS is far from that;
with many rows cuBLAS is better than these kernels. `benchmarks/linears.py` measures every candidate
beside cuBLAS; its tables, measured on H200s, are what the numbers below are set from.

| rows | dtype | kernel |
|---|---|---|
| 2 .. FEW_ROWS, weights that are not large | float16, bfloat16 | few rows, where it is used |
| 1; 2 where the weight is small, or in float32 | any | vector: whole weight rows in registers |
| .. TILE_ROWS | float16, bfloat16 | tile: tensor cores, the inputs split where outputs are few |
| 33 .. TILE_ROWS, for 67 to 95 tiles of too few inputs to split | as above | cuBLAS |
| .. WIDE_ROWS, gate and up of enough outputs (`choose_gated`) | as above | tile |
| .. WIDE_ROWS, few outputs, whose parts a norm sums (`choose_parts`) | as above | tile |
| all others, or MAX_WEIGHTS exceeded | any | cuBLAS, norm and activation as kernels of their own |

Rows of a weight of more than MAX_VECTOR_BYTES take the line below; so does float32 from 3 rows on.

A bias changes nothing here, but that no norm sums the parts of its product. These kernels add it;
cuBLAS leaves that of a product that it adds to the residual to a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from nanovllm_core.kernels import next_power_of_2
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS

VECTOR_ROWS = 2
FEW_ROWS = 8
"""Most rows of the kernel in Gluon, those of one instruction. It is used where attention prepares
q, k and v itself, and so begins beside their product: on an H200 steps of Qwen3-0.6B take 18 % less
time so at four rows, 15 % at three, 4 % at two, and 13 to 14 % at five and eight. With a kernel
between them they take 3 to 4 % more at eight, and those of a model of 16 KV heads 4 to 13 %."""
MAX_FEW_WEIGHTS = {True: 2**26, False: 2**25}
"""Most weights of that kernel, of gate and up together, and of others. In whole models on an H200
steps of 2 to 8 rows take 4 to 8 % less time so with 1.7B and 4B, and 3 % with 8B, whose gate, up
and down are larger. At 4 rows it is 1 % with all of 8B's, and 6 % more with 32B's, of 42 to 52
million."""
TILE_ROWS = 64
WIDE_ROWS = 128
"""Up to so many, some products are faster where one kernel does what cuBLAS leaves to the next."""
MAX_VECTOR_BYTES = 65536
"""Longer rows of a weight do not fit a program's registers."""
MAX_TWO_ROW_WEIGHTS = 2**23
"""With two rows the vector kernel is bound by arithmetic, which a short stream hides."""
MAX_WEIGHTS = 2**31 - 1
"""OUTPUTS * INPUTS is a constant of 32 bits in the kernels."""

_SOME_ROWS = 32
"""Up to so many, a stage takes so little shared memory that twice as many programs are resident."""
_NARROW_OUTPUTS = {True: 1024, False: 1536}
"""Fewer outputs, with few rows and with more, take tiles of 32. With more, x is the wide side."""
_WHOLE_TILES = 96
"""So many tiles are not split: the exchange of parts costs more than idle multiprocessors."""
_PART_STEPS = 4
"""Least steps of a part, where most multiprocessors would be idle."""
_PARTS_STEPS = {True: (4, 8), False: (8, 20)}
"""The same with few rows and with more, where half of them would be idle, and where fewer would."""
_VECTOR_WEIGHTS = 8192
"""Weights of a vector program, where that makes enough rows."""
_LONG_ROWS = {8192: (4, 8), 32768: (2, 16)}
"""By the padded length: weight rows and warps of a program for one row in half precision, if there
are rows for two programs on each multiprocessor. With a `rest` there are half the warps: padding
would take the registers of loads. On an H200 products of rows of 5,120 to 8,192 take 5 to 8 % less
time so than in programs of two padded rows, of 17,408 12 % less; those of 9,728 to 14,336 and of
25,600 do not."""
_MOST_HELD = 6
"""Of 16 weight rows and 64 inputs: 96 registers of each thread. With four, steps of 4 rows of
Qwen3-0.6B, 1.7B and 8B took 3 % more time on an H200."""
_VECTOR = 8
"""Numbers of half precision in 16 bytes. Rows that do not begin at them are loaded one by one."""
_WARP_BYTES = 8192
"""Of weights in the registers of a warp, all in flight at once: 64 registers of each thread."""
_SHORT_ROW, _SHORT_ROWS = 1024, 4
"""A warp alone holds so many rows of that length, and sums them without a barrier: on an H200 the
products of a layer of Qwen3-0.6B take 3 % less time at one row, and 7 % more at two."""
_ONE_WAVE_ROW, _ONE_WAVE = 4096, (8, 16)
"""Rows and warps of a program, where all fit on the multiprocessors at once, two on each. A layer
of Qwen3-30B-A3B at one row, whose output projection it is, takes 0.6 % less time on an H200 and
1.1 % less on an H100."""
_MOST_WARPS = 8
"""Of a program behind a mixture."""

# Of TILE_ROWS + 1 to WIDE_ROWS rows:
_MOST_WASTE = 4 / 3
"""Places of programs for each tile of gate and up."""
_SHORT_INPUTS = 2048
"""Up to so many, a program for each multiprocessor is enough, and parts are of tiles of 32."""
_PARTS_OUTPUTS = 1024
"""Most outputs of which parts are made."""
_MOST_PARTS = 8
"""A norm reads all of them."""
_LEAST_STEPS = 3
"""Of a part."""


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """`block_n` weight rows per program.

    A row is padded to a power of two; or, with `rest`, so many inputs are loaded by themselves
    behind the half of that.
    """

    block_n: int
    num_warps: int
    rest: int = 0


@dataclass(frozen=True, slots=True)
class TilePlan:
    """`block_n` weight rows by `block_k` inputs per step; `splits` programs share the inputs."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class FewRowsPlan:
    """`block_n` weight rows per program, whole, a part of the inputs for each warp.

    Of its steps of `block_k` inputs, a warp has `held` on their way at a time.
    """

    num_warps: int
    held: int
    block_n: int = 16
    block_k: int = 64


LinearPlan = VectorPlan | TilePlan | FewRowsPlan


@lru_cache(maxsize=1024)
def choose(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> LinearPlan | None:
    """The plan for x [rows, inputs] by a weight [outputs, inputs]; None means cuBLAS."""
    if rows < 1 or rows > TILE_ROWS or outputs * inputs > MAX_WEIGHTS:
        return None
    half = _is_half(dtype)
    most_rows = 1 if half and outputs * inputs > MAX_TWO_ROW_WEIGHTS else VECTOR_ROWS
    if rows <= most_rows and inputs * dtype.itemsize <= MAX_VECTOR_BYTES:
        return _vector_plan(rows, outputs, inputs, dtype)
    if not half:
        return None
    few_rows, tiles, steps = rows <= _SOME_ROWS, -(-outputs // 64), -(-inputs // 128)
    if outputs < _NARROW_OUTPUTS[few_rows]:
        return _narrow_tile_plan(few_rows, outputs, inputs)
    if tiles < _WHOLE_TILES:
        return _split_tile_plan(few_rows, tiles, steps)
    return _whole_tile_plan(few_rows, tiles)


def choose_plan(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool, few_rows: bool
) -> LinearPlan | None:
    """The plan of a set's product, of which there is a kernel in Gluon with `few_rows`; `gated`: of
    gate and up with the activation inside, where `outputs` counts both. None means cuBLAS."""
    plan = choose_few_rows(rows, outputs, inputs, dtype, gated=gated) if few_rows else None
    if plan is not None:
        return plan
    return (choose_gated if gated else choose)(rows, outputs, inputs, dtype)


@lru_cache(maxsize=1024)
def choose_few_rows(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool = False
) -> FewRowsPlan | None:
    """The plan of the kernel in Gluon: None where another is faster; with `gated`, `outputs` counts
    gate and up. Few programs have more warps, so that as much is on its way."""
    if not 2 <= rows <= FEW_ROWS or not _is_half(dtype) or inputs % _VECTOR:
        return None
    if outputs * inputs > MAX_FEW_WEIGHTS[gated]:
        return None
    plan = FewRowsPlan(8 if outputs // 16 <= MULTIPROCESSORS else 4, _MOST_HELD)
    steps = -(-inputs // (plan.num_warps * plan.block_k))
    return replace(plan, held=min(steps, _MOST_HELD))


@lru_cache(maxsize=1024)
def choose_gated(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> LinearPlan | None:
    """The plan of gate and up with the activation inside; `outputs` counts both."""
    if rows <= TILE_ROWS:
        return choose(rows, outputs, inputs, dtype)
    if rows > WIDE_ROWS or outputs * inputs > MAX_WEIGHTS or not _is_half(dtype):
        return None
    return _wide_gated_plan(outputs, inputs)


@lru_cache(maxsize=1024)
def choose_parts(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> TilePlan | None:
    """The plan of a product whose parts the next kernel sums: None where it has one part.

    That kernel reads every part, so there are no more than fill the multiprocessors once.
    """
    if TILE_ROWS < rows <= WIDE_ROWS and _is_half(dtype):
        return _wide_parts_plan(outputs, inputs)
    plan = choose(rows, outputs, inputs, dtype)
    if not isinstance(plan, TilePlan):
        return None
    splits = min(plan.splits, MULTIPROCESSORS // -(-outputs // plan.block_n))
    return replace(plan, splits=splits) if splits > 1 else None


def behind_experts(plan: LinearPlan | None) -> LinearPlan | None:
    """The plan of a product whose weight was announced by the mixture before it.

    Twice the warps, of half the registers, find room sooner while programs of the mixture end: on
    an H200 a layer of Qwen3-30B-A3B takes 2.6 % less time so at one row, of V2-Lite 1.8 %, on an
    H100 the first 1.6 %; the same product of a dense model takes as long, or 1 % more.
    """
    if isinstance(plan, VectorPlan) and plan.num_warps <= _MOST_WARPS // 2:
        return replace(plan, num_warps=2 * plan.num_warps)
    return plan


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _vector_plan(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> VectorPlan:
    padded, block_n, num_warps = next_power_of_2(inputs), 0, 0
    if rows == 1 and _is_half(dtype):
        wave_n, wave_warps = _ONE_WAVE
        if padded == _SHORT_ROW:
            return VectorPlan(_SHORT_ROWS, 1)
        if padded == _ONE_WAVE_ROW and 1 < -(-outputs // wave_n) / MULTIPROCESSORS <= 2:
            return VectorPlan(wave_n, wave_warps)
        block_n, num_warps = _LONG_ROWS.get(padded, (0, 0))
    if not 0 < 2 * MULTIPROCESSORS * block_n <= outputs:
        block_n = min(max(_VECTOR_WEIGHTS // padded, 4 if padded <= 4096 else 2), 16)
        return VectorPlan(block_n, max(block_n * padded * dtype.itemsize // _WARP_BYTES, 1))
    rest = next_power_of_2(inputs - padded // 2)
    if rest == padded // 2:
        return VectorPlan(block_n, num_warps)
    return VectorPlan(block_n, num_warps // 2, rest)


def _narrow_tile_plan(few_rows: bool, outputs: int, inputs: int) -> TilePlan:
    """As many parts as give every multiprocessor a program, of two steps or four at least."""
    block_k, num_stages, least = (256, 3, 2) if few_rows else (128, 4, 4)
    splits = min(MULTIPROCESSORS // -(-outputs // 32), -(-inputs // block_k) // least)
    return TilePlan(32, block_k, max(splits, 1), num_warps=4, num_stages=num_stages)


def _split_tile_plan(few_rows: bool, tiles: int, steps: int) -> TilePlan | None:
    """A program or two for each multiprocessor, by parts of the inputs, where parts are long."""
    half_idle = 2 * tiles <= MULTIPROCESSORS
    splits = (2 if few_rows or not half_idle else 1) * MULTIPROCESSORS // tiles
    if 3 * tiles <= MULTIPROCESSORS:
        splits = max(min(splits, steps // _PART_STEPS), 1)
    elif steps < splits * _PARTS_STEPS[few_rows][not half_idle]:
        if not few_rows and not half_idle:
            return None
        splits = 1
    num_stages = 4 if few_rows or tiles * splits <= MULTIPROCESSORS else 3
    return TilePlan(block_n=64, block_k=128, splits=splits, num_warps=4, num_stages=num_stages)


def _whole_tile_plan(few_rows: bool, tiles: int) -> TilePlan:
    """Up to two programs for each multiprocessor: long steps. More: the tiles that waste less.

    Programs of short steps are resident three at a time; of four long stages, or of twice the
    outputs, two.
    """
    if tiles <= 2 * MULTIPROCESSORS:
        num_stages = 4 if few_rows or tiles <= MULTIPROCESSORS else 3
        return TilePlan(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=num_stages)
    by_three = _waste(tiles, 3 * MULTIPROCESSORS)
    if few_rows:
        num_stages = 3 if by_three <= _waste(tiles, 2 * MULTIPROCESSORS) else 4
        return TilePlan(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=num_stages)
    block_n = 64 if by_three <= _waste(-(-tiles // 2), 2 * MULTIPROCESSORS) else 128
    return TilePlan(block_n=block_n, block_k=64, splits=1, num_warps=4, num_stages=4)


def _wide_gated_plan(outputs: int, inputs: int) -> TilePlan | None:
    """Two programs a multiprocessor, in waves that are full enough; of short inputs one program.

    With others, and where most multiprocessors would have no program, cuBLAS is faster.
    """
    narrow, wide = -(-outputs // 64), -(-outputs // 128)
    if inputs <= _SHORT_INPUTS and MULTIPROCESSORS <= 2 * narrow <= 2 * MULTIPROCESSORS:
        return TilePlan(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=3)
    if inputs <= _SHORT_INPUTS and narrow > MULTIPROCESSORS >= wide:
        return TilePlan(block_n=128, block_k=64, splits=1, num_warps=8, num_stages=4)
    if wide > MULTIPROCESSORS and _waste(wide, 2 * MULTIPROCESSORS) <= _MOST_WASTE:
        return TilePlan(block_n=128, block_k=64, splits=1, num_warps=8, num_stages=3)
    return None


def _wide_parts_plan(outputs: int, inputs: int) -> TilePlan | None:
    """Of few outputs; longer inputs in more parts. With more outputs cuBLAS is faster."""
    if outputs > _PARTS_OUTPUTS:
        return None
    block_n, block_k = 32 if inputs <= _SHORT_INPUTS else 64, 64
    programs, steps = MULTIPROCESSORS // -(-outputs // block_n), -(-inputs // block_k)
    splits = min(programs, steps // _LEAST_STEPS, _MOST_PARTS)
    return TilePlan(block_n, block_k, splits, num_warps=4, num_stages=4) if splits > 1 else None


def _waste(tiles: int, resident: int) -> float:
    """Places of programs in all waves, for each tile."""
    return -(-tiles // resident) * resident / tiles
