"""Which kernels compute a mixture of experts, by its shape: one rule, in one place.

| of the pairs (token, expert), to an expert of their own | kernels |
|---|---|
| FEW_SHARE or more | `experts_few`: each pair reads its expert's weights |
| less | `experts_many`: pairs in the order of experts, tiles by an expert's mean rows |

The choice and all grids depend on shapes alone, never on who chose what, so a captured step can be
replayed. `benchmarks/experts.py` measures candidates beside the time of the stream of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from nanovllm_core.kernels import next_power_of_2
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS

FEW_SHARE = 0.85
"""Of all pairs, those that would be left if each expert were chosen once. On an H200 sorted pairs
were as fast at 0.86 (six tokens that choose 8 of 128 experts), 3 % faster at 0.79 and 6 % slower at
0.95."""

DENSE_SHARED_TOKENS = 4096
"""From here on shared experts are dense products of cuBLAS. On an H200 it reaches up to 790 TFLOP/s
and grouped products 520, which is more than the further kernels cost."""

_STEP_BYTES = 16384
"""Of weights in a step of `experts_few`."""
_FEW_SIZES = (16, 8, 4, 2)
"""Weight rows of a tile of `experts_few`."""
_WARP_BYTES = 4096
"""Of weights in a warp's part of a step. On an H200 a layer of experts of 384 columns, whose steps
of the down projection have 8,192 bytes, took 7 % less with two warps than with four."""
_MOST_BUFFERS = 9
"""Steps of weights under way. More only make the code longer."""
_AHEAD = 4
"""Steps of a tile of the down projection, some 12 MB in all: what memory delivers meanwhile."""
MOST_FETCHED = 2**22
"""Bytes of the next product's weight that come while a router chooses. On an H100 a layer of
Qwen3-30B-A3B took 48.0 us at one token, with 2 to 6 MiB 47.2, with 12 47.8 and with 20 50.1: then
the experts wait. V2-Lite was the fastest with 3."""
_MOST_ROWS = {16: 8, 32: 24, 64: 56}
"""Of an expert on average, by the rows of its tiles. The lowest tiles serve only half their rows:
those of 32 take hardly longer. On an H200 the experts of Qwen3-30B-A3B take 7 % less time in tiles
of 64 than in others at 512 and 896 tokens, 32 and 56 rows of an expert, and 5 % more at 1,024."""
_TALL, _MOST_SHARED = 64, 1.5
"""Rows of a tile where shared experts have more than so many rows for each of all experts: in low
tiles these would be a tenth of all tiles. On an H200 V2-Lite gives 3 % more tokens per second so at
64 and 192 rows, 4 % at 256, and as many at 128. Of the next power of two of tokens, as below."""
_LINE_BYTES = 128
"""Of a weight row in a step of `experts_many`."""
_LARGE_SHARED_MEMORY = 190000
"""Bytes for the steps of a program of large tiles; GPUs for graphics grant 101376."""
_BLACKWELL = (10, 11)
"""The compute capabilities (major) of its GPUs with 227 KiB: B200, B300, Thor."""
_BLACKWELL_RESULTS = 2**15
"""Bytes of a program there that steps cannot have: results leave its tensor memory through them."""
_SHARED_MEMORY_OF_PROCESSOR = 233472
"""Bytes of an H100 or H200, 1024 for the system with each program included."""


@dataclass(frozen=True, slots=True)
class FewPlan:
    """`block_n` weight rows (of gate and up together) by `block_k` inputs in each step."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 6
    per_processor: int = 2
    """Programs that share a multiprocessor."""
    ahead: int = 0
    """Steps of the down projection whose weights are fetched before the kernel waits."""
    lanes: int = 1
    """Partial sums of a weight row that stay apart between steps."""
    signal: int = 6
    """Steps before its end with which a program lets the next kernel start."""


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Tiles of `block_m` rows by `block_n` weight rows (of gate and up together)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_processor: int
    described: bool = False
    """Hopper's copy engine ("TMA") reads tiles of weights, and of what is in the order of experts.

    For sizes of whole 16 bytes.
    """


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


def memory_for_steps(granted: int, capability: int) -> int:
    """Bytes that the steps of a program may have, of those which the GPU grants a program.

    `capability`: its compute capability, major.
    """
    return granted - _BLACKWELL_RESULTS if capability in _BLACKWELL else granted


@lru_cache(maxsize=1024)
def choose_experts(
    tokens: int, chosen: int, num_experts: int, hidden: int, intermediate: int, itemsize: int,
    shared_memory: int, num_shared: int = 0,
) -> ExpertsPlan:  # fmt: skip
    """The plan for x [tokens, hidden] and `num_experts` MLPs, `chosen` of them for each token.

    `shared_memory`: see `memory_for_steps`. `num_shared` of the experts are chosen by all tokens.
    """
    if _share_of_experts(tokens, chosen, num_experts, num_shared) >= FEW_SHARE:
        gate_up = _few_plan(tokens, 2 * chosen * intermediate, hidden, itemsize)
        down = _few_plan(tokens, hidden, intermediate, itemsize)
        return FewExperts(gate_up, replace(down, ahead=_AHEAD))
    rows = -(-tokens * (chosen - num_shared) // (num_experts - num_shared))
    block_m = _rows_of_tile(rows, itemsize)
    if itemsize == 2 and num_shared * next_power_of_2(tokens) > _MOST_SHARED * num_experts:
        block_m = max(block_m, _TALL)
    is_large = itemsize == 2 and shared_memory >= _LARGE_SHARED_MEMORY
    plan = (
        _large_plan(block_m, shared_memory)
        if is_large
        else _small_plan(block_m, _LINE_BYTES // itemsize)
    )
    if hidden * itemsize % 16 or intermediate * itemsize % 16:
        plan = replace(plan, described=False)
    return ManyExperts(plan, plan)


def _share_of_experts(tokens: int, chosen: int, num_experts: int, num_shared: int) -> float:
    """Experts that are chosen, of the pairs, if every routed expert is as likely as another.

    Of the next power of two of tokens: a start tries those, and has compiled all that follows.
    """
    routed, tokens = num_experts - num_shared, next_power_of_2(tokens)
    missed = (1 - (chosen - num_shared) / routed) ** tokens
    return (num_shared + routed * (1 - missed)) / (tokens * chosen)


def _rows_of_tile(rows: int, itemsize: int) -> int:
    """For `rows` of an expert on average: most experts have one tile."""
    tallest = 128 if itemsize == 2 else 64  # float32 has no tensor cores, and twice the registers
    heights = (height for height, most in _MOST_ROWS.items() if rows <= most)
    return min(next(heights, tallest), tallest)


def _few_plan(tokens: int, outputs: int, inputs: int, itemsize: int) -> FewPlan:
    """`outputs` are the weight rows of one token's work.

    The size of tiles is that with which the busiest program reads least: its weight rows, and the
    inputs once for each tile. Only sizes that are the best for some power of two of tokens are
    taken, so that a start that tries those compiles all.
    """

    def busiest(block_n: int, tokens: int) -> int:
        tiles = tokens * -(-outputs // block_n)
        return -(-tiles // programs) * (block_n + 1)

    programs = FewPlan(1, 1).per_processor * MULTIPROCESSORS
    powers = [1 << power for power in range(tokens.bit_length())]
    sizes = [min(_FEW_SIZES, key=lambda size: busiest(size, power)) for power in powers]
    block_n = min(sizes, key=lambda size: busiest(size, tokens))
    block_k = min(next_power_of_2(inputs), _STEP_BYTES // max(block_n, 8) // itemsize)
    buffer = (block_n + 1) * block_k * itemsize
    num_warps = min(max(block_n * block_k * itemsize // _WARP_BYTES, 1), 4)
    lanes = max(block_k * itemsize // 16, 1)  # of each thread one, which reads 16 bytes at once
    stages = _buffers_of_two_programs(buffer) + 1
    return FewPlan(block_n, block_k, num_warps, num_stages=stages, lanes=lanes)


def _buffers_of_two_programs(size: int) -> int:
    """The fewest, of `size` bytes, with which no third program fits on a multiprocessor.

    Programs of the next kernel start while those of this one end. Where three would fit, some
    multiprocessors get three and others one, and the kernel waits for the fullest. Two of each
    kernel side by side are up to 5 % faster alone, and up to 25 % slower behind a router.
    """
    return min(_SHARED_MEMORY_OF_PROCESSOR // 3 // size + 1, _MOST_BUFFERS)


_LARGE_PLANS = {
    16: GroupedPlan(16, 128, 128, num_warps=4, num_stages=3, per_processor=2),
    32: GroupedPlan(32, 256, 128, num_warps=8, num_stages=3, per_processor=1),
    64: GroupedPlan(64, 128, 128, num_warps=8, num_stages=4, per_processor=1, described=True),
    128: GroupedPlan(128, 256, 64, num_warps=8, num_stages=3, per_processor=1, described=True),
}
"""By the rows of a tile, in half precision. No more programs fit on a multiprocessor than share it:
see `_buffers_of_two_programs`."""


def _large_plan(block_m: int, shared_memory: int) -> GroupedPlan:
    """With as many stages as fit: on Blackwell tiles of 32 rows have one less."""
    plan = _LARGE_PLANS[block_m]
    step = 2 * (plan.block_m + plan.block_n) * plan.block_k
    return replace(plan, num_stages=min(plan.num_stages, shared_memory // step))


def _small_plan(block_m: int, block_k: int) -> GroupedPlan:
    """Within 99 KiB, and of float32 within the registers."""
    stages = {16: 5, 32: 4, 64: 3, 128: 2}[block_m]
    warps = 8 if block_m >= 64 else 4
    return GroupedPlan(block_m, 128, block_k, warps, stages, per_processor=1)
