"""Mixtures of experts: which kernels compute one, by its number of (token, expert) pairs.

| pairs | kernels |
|---|---|
| to FEW_PAIRS | `experts_few`: each pair reads its expert's weights |
| more | `experts_many`: pairs in the order of experts, tiles of as many rows as experts have |

The choice and all grids depend on shapes alone, never on who chose what, so a captured step can be
replayed. `benchmarks/experts.py` measures both beside the time of the stream of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from nanovllm_kernels_triton.experts_few import few_down_kernel, few_gate_up_kernel
from nanovllm_kernels_triton.experts_many import (
    combine_kernel,
    grouped_down_kernel,
    grouped_gate_up_kernel,
    sort_pairs_kernel,
)

FEW_PAIRS = 64
"""Up to here sorting would cost more than it saves; most pairs have an expert of their own."""

_PROCESSORS = 132
"""The multiprocessors of an H100 or H200. A guide, not a limit."""
_STEP_BYTES = 16384
"""Of weights in a step of `experts_few`."""
_SORT_BLOCK = 4096
_COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FewPlan:
    """`block_n` weight rows (of gate and up together) by `block_k` inputs in each step."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    per_processor: int = 2
    """Programs that share a multiprocessor."""


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
    tokens: int, chosen: int, num_experts: int, hidden: int, intermediate: int, itemsize: int
) -> ExpertsPlan:
    """The plan for x [tokens, hidden] and `num_experts` MLPs, `chosen` of them for each token."""
    pairs = tokens * chosen
    if pairs <= FEW_PAIRS:
        return FewExperts(
            _few_plan(pairs, intermediate, hidden, itemsize, gated=True),
            _few_plan(tokens, hidden, intermediate, itemsize, gated=False),
        )
    rows = triton.cdiv(pairs, num_experts)
    block_m = min(max(triton.next_power_of_2(2 * rows), 16), 128)
    return ManyExperts(_grouped_plan(block_m, itemsize), _grouped_plan(block_m, itemsize))


def _few_plan(rows: int, outputs: int, inputs: int, itemsize: int, *, gated: bool) -> FewPlan:
    """The largest tile of those that divide the work most evenly among programs."""
    block_k = min(triton.next_power_of_2(inputs), _STEP_BYTES // 8 // itemsize)
    programs = FewPlan(1, 1).per_processor * _PROCESSORS

    def evenness(block_n: int) -> float:
        tiles = triton.cdiv(outputs, block_n // 2 if gated else block_n)
        return tiles / (triton.cdiv(tiles, programs) * programs)

    sizes = (8, 4, 2) if gated else (8, 4)
    return FewPlan(max(sizes, key=evenness), block_k)


def _grouped_plan(block_m: int, itemsize: int) -> GroupedPlan:
    """Two programs a multiprocessor, and from 128 rows on one that computes twice as much."""
    if block_m == 128:
        return GroupedPlan(128, 256, 128 // itemsize, 8, 4, 1)
    return GroupedPlan(block_m, 128, 128 // itemsize, 4, 5 if block_m == 16 else 4, 2)


def run_experts(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor,
    options: dict[str, Any], plan: ExpertsPlan | None = None,
) -> Tensor:  # fmt: skip
    """See `KernelSet.experts`; `options` are those of `launch_options`."""
    num_experts, hidden, intermediate = down_NEF.shape
    if plan is None:
        plan = choose_experts(*ids_TC.shape, num_experts, hidden, intermediate, x_TE.dtype.itemsize)
    run = _run_few if isinstance(plan, FewExperts) else _run_many
    weights_TC, ids_TC = weights_TC.contiguous(), ids_TC.contiguous()
    return run(plan, x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF, options)


def _run_few(
    plan: FewExperts, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor,
    down_NEF: Tensor, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    (num_tokens, chosen), (_, hidden, intermediate) = ids_TC.shape, down_NEF.shape
    num_pairs = num_tokens * chosen
    hidden_PF = x_TE.new_empty((num_pairs, intermediate))
    out_TE = x_TE.new_empty((num_tokens, hidden))
    block_n = plan.gate_up.block_n // 2
    tiles = num_pairs * triton.cdiv(intermediate, block_n)
    few_gate_up_kernel[(min(tiles, plan.gate_up.per_processor * _PROCESSORS),)](
        x_TE, ids_TC, gate_up_N2FE, hidden_PF, num_pairs, x_TE.stride(0),
        CHOSEN=chosen, OUTPUTS=intermediate, INPUTS=hidden,
        BLOCK_N=block_n, BLOCK_K=plan.gate_up.block_k, STAGES=plan.gate_up.num_stages,
        num_warps=plan.gate_up.num_warps, **options,
    )  # fmt: skip
    tiles = num_tokens * triton.cdiv(hidden, plan.down.block_n)
    few_down_kernel[(min(tiles, plan.down.per_processor * _PROCESSORS),)](
        hidden_PF, weights_TC, ids_TC, down_NEF, out_TE, num_tokens,
        CHOSEN=chosen, OUTPUTS=hidden, INPUTS=intermediate,
        BLOCK_N=plan.down.block_n, BLOCK_K=plan.down.block_k, STAGES=plan.down.num_stages,
        num_warps=plan.down.num_warps, **options,
    )  # fmt: skip
    return out_TE


def _run_many(
    plan: ManyExperts, x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor,
    down_NEF: Tensor, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    (num_tokens, chosen), (num_experts, hidden, intermediate) = ids_TC.shape, down_NEF.shape
    num_pairs, block_m = num_tokens * chosen, plan.gate_up.block_m
    most_tiles = num_pairs // block_m + min(num_experts, num_pairs)
    pairs_P = ids_TC.new_empty(num_pairs)
    tiles = ids_TC.new_empty((3, most_tiles))
    num_tiles = ids_TC.new_empty(1)
    hidden_PF = x_TE.new_empty((num_pairs, intermediate))
    result_PE = x_TE.new_empty((num_pairs, hidden))
    out_TE = x_TE.new_empty((num_tokens, hidden))
    block = min(triton.next_power_of_2(num_pairs), _SORT_BLOCK)
    sort_pairs_kernel[(num_experts,)](
        ids_TC, pairs_P, tiles, num_tiles, num_pairs, most_tiles,
        BLOCK_M=block_m, BLOCK=block, BINS=triton.next_power_of_2(num_experts),
        num_warps=min(max(block // 256, 1), 8), **options,
    )  # fmt: skip
    order = (pairs_P, tiles, num_tiles)
    block_n = plan.gate_up.block_n // 2
    programs = min(most_tiles * triton.cdiv(intermediate, block_n), _programs(plan.gate_up))
    grouped_gate_up_kernel[(programs,)](
        x_TE, *order, gate_up_N2FE, hidden_PF, most_tiles, x_TE.stride(0),
        CHOSEN=chosen, OUTPUTS=intermediate, INPUTS=hidden,
        BLOCK_M=block_m, BLOCK_N=block_n, **_loop(plan.gate_up), **options,
    )  # fmt: skip
    programs = min(most_tiles * triton.cdiv(hidden, plan.down.block_n), _programs(plan.down))
    grouped_down_kernel[(programs,)](
        hidden_PF, *order, down_NEF, result_PE, most_tiles,
        OUTPUTS=hidden, INPUTS=intermediate,
        BLOCK_M=block_m, BLOCK_N=plan.down.block_n, **_loop(plan.down), **options,
    )  # fmt: skip
    combine_kernel[(num_tokens, triton.cdiv(hidden, _COMBINE_BLOCK))](
        result_PE, weights_TC, out_TE,
        CHOSEN=chosen, SIZE=hidden, BLOCK=_COMBINE_BLOCK, num_warps=4, **options,
    )  # fmt: skip
    return out_TE


def _programs(plan: GroupedPlan) -> int:
    return plan.per_processor * _PROCESSORS


def _loop(plan: GroupedPlan) -> dict[str, int]:
    return {
        "BLOCK_K": plan.block_k,
        "STAGES": plan.num_stages,
        "num_warps": plan.num_warps,
    }
