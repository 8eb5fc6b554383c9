"""Which kernels compute a mixture of experts, by its shape: one rule, in one place.

| (token, expert) pairs | kernels |
|---|---|
| to FEW_PAIRS, or FEW_PAIRS_WITH_SHARED | `experts_few`: each pair reads its expert's weights |
| more | `experts_many`: pairs in the order of experts, in tiles of twice an expert's mean rows |

The choice and all grids depend on shapes alone, never on who chose what, so a captured step can be
replayed. `benchmarks/experts.py` measures candidates beside the time of the stream of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

FEW_PAIRS = 64
"""Up to here sorting would cost more than it saves; most pairs have an expert of their own."""

FEW_PAIRS_WITH_SHARED = 31
"""The same with shared experts: every token reads them again, which sorted pairs do not."""

DENSE_SHARED_TOKENS = 4096
"""From here on shared experts are dense products of cuBLAS. On an H200 it reaches up to 790 TFLOP/s
and grouped products 410, which is more than the further kernels cost."""

PROCESSORS = 132
"""The multiprocessors of an H100 or H200. A guide, not a limit."""

_STEP_BYTES = 16384
"""Of weights in a step of `experts_few`."""
_LINE_BYTES = 128
"""Of a weight row in a step of `experts_many`."""
_LARGE_SHARED_MEMORY = 230000
"""Bytes that a program may have on Hopper; on GPUs for graphics, 101376."""


@dataclass(frozen=True, slots=True)
class FewPlan:
    """`block_n` weight rows (of gate and up together) by `block_k` inputs in each step."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 5
    per_processor: int = 2
    """Programs that share a multiprocessor."""
    ahead: int = 0
    """Steps of the down projection whose weights are fetched before the kernel waits."""


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Tiles of `block_m` rows by `block_n` weight rows (of gate and up together)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_processor: int


@dataclass(frozen=True, slots=True)
class FewExperts:
    gate_up: FewPlan
    down: FewPlan


@dataclass(frozen=True, slots=True)
class ManyExperts:
    """Both products have tiles of equally many rows."""

    gate_up: GroupedPlan
    down: GroupedPlan


ExpertsPlan = FewExperts | ManyExperts


@lru_cache(maxsize=1024)
def choose_experts(
    tokens: int, chosen: int, num_experts: int, hidden: int, intermediate: int, itemsize: int,
    shared_memory: int, num_shared: int = 0,
) -> ExpertsPlan:  # fmt: skip
    """The plan for x [tokens, hidden] and `num_experts` MLPs, `chosen` of them for each token.

    `shared_memory`: bytes that a program may have. `num_shared` of the experts are chosen by all
    tokens; the rows of a tile are for the others.
    """
    if tokens * chosen <= (FEW_PAIRS_WITH_SHARED if num_shared else FEW_PAIRS):
        gate_up = _few_plan(2 * chosen * intermediate, hidden, itemsize, sizes=(8, 4))
        down = _few_plan(hidden, intermediate, itemsize, sizes=(8, 4, 2))
        return FewExperts(gate_up, down)
    rows = -(-tokens * (chosen - num_shared) // (num_experts - num_shared))
    tallest = 128 if itemsize == 2 else 64  # float32 has no tensor cores, and twice the registers
    block_m = min(max(_power_of_two(2 * rows), 16), tallest)
    is_large = itemsize == 2 and shared_memory >= _LARGE_SHARED_MEMORY
    plan = (_grouped_plan if is_large else _small_grouped_plan)(block_m, _LINE_BYTES // itemsize)
    return ManyExperts(plan, plan)


def _few_plan(outputs: int, inputs: int, itemsize: int, sizes: tuple[int, ...]) -> FewPlan:
    """The largest tile of those that divide one token's work most evenly among programs."""
    block_k = min(_power_of_two(inputs), _STEP_BYTES // 8 // itemsize)
    programs = FewPlan(1, 1).per_processor * PROCESSORS

    def evenness(block_n: int) -> float:
        tiles = -(-outputs // block_n)
        return tiles / (-(-tiles // programs) * programs)

    return FewPlan(max(sizes, key=evenness), block_k)


def _grouped_plan(block_m: int, block_k: int) -> GroupedPlan:
    """Two programs a multiprocessor, and with 128 rows one that computes twice as much."""
    if block_m == 128:
        return GroupedPlan(128, 256, block_k, num_warps=8, num_stages=4, per_processor=1)
    stages = 4 if block_m == 64 else 5
    return GroupedPlan(block_m, 128, block_k, num_warps=4, num_stages=stages, per_processor=2)


def _small_grouped_plan(block_m: int, block_k: int) -> GroupedPlan:
    """Within 99 KiB, and of float32 within the registers."""
    stages = {16: 5, 32: 4, 64: 3, 128: 2}[block_m]
    warps = 8 if block_m >= 64 else 4
    return GroupedPlan(block_m, 128, block_k, warps, stages, per_processor=1)


def _power_of_two(number: int) -> int:
    """The least that is not below."""
    return 1 << (number - 1).bit_length()
