"""Launches of the kernels for mixtures of experts, in the order in which a mixture needs them.

Shape suffixes: those of `KernelSet`, and P = T·C (token, expert) pairs. `options` are those of
`nanovllm_core.kernels.launch_options`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm_core.api import Routing
from nanovllm_core.kernels import cdiv, next_power_of_2
from nanovllm_kernels_triton.experts_choice import (
    MOST_FETCHED,
    ExpertsPlan,
    FewExperts,
    FewPlan,
    GroupedPlan,
    choose_experts,
    memory_for_steps,
)
from nanovllm_kernels_triton.experts_few import few_down_kernel, few_gate_up_kernel
from nanovllm_kernels_triton.experts_many import (
    combine_kernel,
    count_pairs_kernel,
    grouped_down_kernel,
    grouped_gate_up_kernel,
    place_pairs_kernel,
    sort_pairs_kernel,
)
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS
from nanovllm_kernels_triton.norm_rank import choose_norm_rank, run_norm_rank
from nanovllm_kernels_triton.norm_route import EMPTY, NormRoutePlan
from nanovllm_kernels_triton.strides import in_units

_SORT_BLOCK = 4096
"""Up to so many pairs, each expert's program reads all."""
_SORT_WARPS = (4, 8)
"""Of such a program, by its pairs: on an H200 with 128 experts four were the fastest up to 1,024
pairs, where one or two took up to 2.5 times as long, and eight for more."""
_PLACE_BLOCK = 1024
"""Pairs that one program sorts where there are more."""
_COMBINE_BLOCK = 1024

Options = dict[str, Any]


class Order(NamedTuple):
    """Pairs in the order of their experts, and the tiles of at most `block_m` rows among them.

    `tile_pairs` [tiles, block_m] are the pairs of each tile, `rows` [P] the place of each pair.
    `num_tiles` [1] is known on the device alone; `tiles` has room for the most there can be.
    """

    tile_pairs: Tensor
    rows: Tensor
    tiles: Tensor
    num_tiles: Tensor
    block_m: int

    def programs(self, plan: GroupedPlan, outputs: int, block_n: int) -> int:
        """No more than there can be tiles, or than are resident at once."""
        most: int = self.tiles.shape[1] * cdiv(outputs, block_n)
        return min(most, plan.per_processor * MULTIPROCESSORS)


def run_experts(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor,
    options: Options, plan: ExpertsPlan | None = None, *,
    num_shared: int = 0, residual_TE: Tensor | None = None, next_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `KernelSet.experts`, and `few_gate_up` for the next weight."""
    num_experts, hidden, intermediate = down_NEF.shape
    weights_TC, ids_TC = weights_TC.contiguous(), ids_TC.contiguous()
    if plan is None:
        sizes = (num_experts, hidden, intermediate, x_TE.dtype.itemsize)
        plan = choose_experts(*ids_TC.shape, *sizes, shared_memory_of(x_TE.device), num_shared)
    if isinstance(plan, FewExperts):
        hidden_PF = few_gate_up(plan.gate_up, x_TE, ids_TC, gate_up_N2FE, options, next_weight)
        return few_down(plan.down, hidden_PF, weights_TC, ids_TC, down_NEF, options, residual_TE)
    order = sort_pairs(ids_TC, num_experts, plan.gate_up.block_m, options)
    hidden_PF = grouped_gate_up(plan.gate_up, x_TE, order, gate_up_N2FE, options)
    result_PE = grouped_down(plan.down, hidden_PF, order, down_NEF, options)
    return combine(result_PE, order, weights_TC, options, residual_TE)


def choose_norm_experts(
    x_TE: Tensor, weight_NE: Tensor, routing: Routing, down_NEF: Tensor
) -> tuple[NormRoutePlan, FewExperts] | None:
    """The plans of a mixture as one operation; None: the operations apart."""
    (tokens, hidden), num_experts = x_TE.shape, len(weight_NE)
    device, itemsize = x_TE.device, x_TE.dtype.itemsize
    rank_plan = choose_norm_rank(
        tokens, hidden, num_experts, itemsize, routing, multiprocessors_of(device)
    )
    if rank_plan is None:
        return None
    sizes = (*down_NEF.shape, itemsize, shared_memory_of(device))
    plan = choose_experts(tokens, routing.num_chosen, *sizes, routing.num_shared)
    return (rank_plan, plan) if isinstance(plan, FewExperts) else None


def run_norm_experts(
    plans: tuple[NormRoutePlan, FewExperts], x_TE: Tensor, norm_weight_E: Tensor, eps: float,
    weight_NE: Tensor, routing: Routing, bias_N: Tensor | None, gate_up_N2FE: Tensor,
    down_NEF: Tensor, passed: Tensor, options: Options, residual_TE: Tensor | None = None,
    next_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `MixtureKernels.norm_experts`, and `few_gate_up` for the next weight.

    `passed` is of `empty_logits`, before and afterwards.
    """
    rank_plan, plan = plans
    try:
        weights_TC, ids_TC, normed_TE = run_norm_rank(
            rank_plan, x_TE, norm_weight_E, eps, weight_NE, routing, bias_N, passed, options
        )
        hidden_PF = few_gate_up(plan.gate_up, normed_TE, ids_TC, gate_up_N2FE, options, next_weight)
        return few_down(
            plan.down, hidden_PF, weights_TC, ids_TC, down_NEF, options, residual_TE,
            passed=passed, num_passed=len(weight_NE),
            scale=routing.scale if routing.renormalize else None,
        )  # fmt: skip
    except BaseException:
        with suppress(RuntimeError):  # of a device that has failed; the first error is told
            passed.fill_(EMPTY.value)  # or the next call would take these for its own
        raise


@lru_cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that a program's steps may have; for the interpreter, those of an H200."""
    if device.type != "cuda":
        return 232448
    # torch's types leave it out.
    properties: Any = torch.cuda.get_device_properties(device)
    return memory_for_steps(int(properties.shared_memory_per_block_optin), int(properties.major))


@lru_cache
def multiprocessors_of(device: torch.device) -> int:
    """Those of an H200 for the interpreter."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def few_gate_up(
    plan: FewPlan, x_TE: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, options: Options,
    next_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate) * up of each pair -> [P, F].

    `next_weight`, contiguous, is that of the next product: its beginning is fetched meanwhile.
    """
    num_pairs, chosen = ids_TC.numel(), ids_TC.shape[1]
    intermediate, hidden = gate_up_N2FE.shape[1] // 2, gate_up_N2FE.shape[2]
    hidden_PF = x_TE.new_empty((num_pairs, intermediate))
    tiles = num_pairs * cdiv(intermediate, plan.block_n // 2)
    few_gate_up_kernel[(min(tiles, plan.per_processor * MULTIPROCESSORS),)](
        x_TE, ids_TC, gate_up_N2FE, hidden_PF, next_weight, num_pairs, x_TE.stride(0),
        NEXT=0 if next_weight is None else min(next_weight.nbytes, MOST_FETCHED),
        CHOSEN=chosen, OUTPUTS=intermediate, INPUTS=hidden, BLOCK_N=plan.block_n // 2,
        LANES=plan.lanes, SIGNAL=plan.signal, **_loop(plan), **options,
    )  # fmt: skip
    return hidden_PF


def few_down(
    plan: FewPlan, hidden_PF: Tensor, weights_TC: Tensor, ids_TC: Tensor, down_NEF: Tensor,
    options: Options, residual_TE: Tensor | None = None,
    *, passed: Tensor | None = None, num_passed: int = 0, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum over each token's experts, on the residual if there is one -> [T, E].

    `passed`: of `empty_logits`, with `num_passed` logits of one token to be taken out; or None.
    `scale`: that of weights which are still to be divided by their sum; None of others.
    """
    (num_tokens, chosen), (_, hidden, intermediate) = ids_TC.shape, down_NEF.shape
    out_TE = residual_TE
    if out_TE is None:
        out_TE = hidden_PF.new_empty((num_tokens, hidden))
    tiles = num_tokens * cdiv(hidden, plan.block_n)
    few_down_kernel[(min(tiles, plan.per_processor * MULTIPROCESSORS),)](
        hidden_PF, weights_TC, ids_TC, down_NEF, out_TE, passed, num_tokens, out_TE.stride(0),
        PASSED=num_passed, SCALE=scale, CHOSEN=chosen,
        OUTPUTS=hidden, INPUTS=intermediate, ADD=residual_TE is not None,
        BLOCK_N=plan.block_n, LANES=plan.lanes, SIGNAL=plan.signal, AHEAD=plan.ahead,
        **_loop(plan), **options,
    )  # fmt: skip
    return out_TE


def sort_pairs(ids_TC: Tensor, num_experts: int, block_m: int, options: Options) -> Order:
    """Pairs by expert, those of one expert in the order of tokens."""
    (tokens, chosen), num_pairs = ids_TC.shape, ids_TC.numel()
    most_tiles = num_pairs // block_m + min(num_experts, num_pairs)
    empty = ids_TC.new_empty
    order = Order(
        empty((most_tiles, block_m)), empty(num_pairs), empty((3, most_tiles)), empty(1), block_m
    )
    bins, sizes = next_power_of_2(num_experts), (num_pairs, most_tiles, block_m)
    if num_pairs <= _SORT_BLOCK:
        # Of a power of two of tokens: a start tries those, and has compiled all.
        most_pairs = next_power_of_2(next_power_of_2(tokens) * chosen)
        block = min(most_pairs, _SORT_BLOCK)
        num_warps = min(max(block // 32, 1), _SORT_WARPS[block > 1024])
        sort_pairs_kernel[(num_experts,)](
            ids_TC, *order[:4], *sizes,
            BLOCK=block, BINS=bins, num_warps=num_warps, **options,
        )  # fmt: skip
        return order
    shared = {"BLOCK": _PLACE_BLOCK, "BINS": bins, "num_warps": 8, **options}
    num_blocks = cdiv(num_pairs, _PLACE_BLOCK)
    counts = ids_TC.new_empty((num_blocks, bins))
    count_pairs_kernel[(num_blocks,)](ids_TC, counts, num_pairs, **shared)
    place_pairs_kernel[(num_blocks,)](ids_TC, counts, *order[:4], *sizes, **shared)
    return order


def grouped_gate_up(
    plan: GroupedPlan, x_TE: Tensor, order: Order, gate_up_N2FE: Tensor, options: Options
) -> Tensor:
    """silu(gate) * up of each row of the order -> [P, F]."""
    num_pairs = len(order.rows)
    intermediate, hidden = gate_up_N2FE.shape[1] // 2, gate_up_N2FE.shape[2]
    hidden_PF = x_TE.new_empty((num_pairs, intermediate))
    block_n = plan.block_n // 2
    x_units, x_unit = in_units(x_TE.stride(0))
    weight_desc = None
    if plan.described:
        weight = gate_up_N2FE.unflatten(1, (2, intermediate))
        weight_desc = _descriptor(weight, 1, 2, block_n, plan.block_k)
    grouped_gate_up_kernel[(order.programs(plan, intermediate, block_n),)](
        x_TE, order.tile_pairs, order.tiles, order.num_tiles, gate_up_N2FE, weight_desc, hidden_PF,
        order.tiles.shape[1], x_units,
        X_UNIT=x_unit, CHOSEN=num_pairs // len(x_TE), OUTPUTS=intermediate, INPUTS=hidden,
        BLOCK_M=order.block_m, BLOCK_N=block_n, **_loop(plan), **options,
    )  # fmt: skip
    return hidden_PF


def grouped_down(
    plan: GroupedPlan, hidden_PF: Tensor, order: Order, down_NEF: Tensor, options: Options
) -> Tensor:
    """The result of each row of the order -> [P, E]."""
    _, hidden, intermediate = down_NEF.shape
    result_PE = hidden_PF.new_empty((len(hidden_PF), hidden))
    hidden_desc, weight_desc = None, None
    if plan.described:
        hidden_desc = _descriptor(hidden_PF, order.block_m, plan.block_k)
        weight_desc = _descriptor(down_NEF, 1, plan.block_n, plan.block_k)
    grouped_down_kernel[(order.programs(plan, hidden, plan.block_n),)](
        hidden_PF, hidden_desc, order.tiles, order.num_tiles, down_NEF, weight_desc, result_PE,
        order.tiles.shape[1],
        OUTPUTS=hidden, INPUTS=intermediate,
        BLOCK_M=order.block_m, BLOCK_N=plan.block_n, **_loop(plan), **options,
    )  # fmt: skip
    return result_PE


def combine(
    result_PE: Tensor, order: Order, weights_TC: Tensor, options: Options,
    residual_TE: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's results, on the residual if there is one -> [T, E]."""
    (num_tokens, chosen), hidden = weights_TC.shape, result_PE.shape[1]
    out_TE = residual_TE
    if out_TE is None:
        out_TE = result_PE.new_empty((num_tokens, hidden))
    combine_kernel[(num_tokens, cdiv(hidden, _COMBINE_BLOCK))](
        result_PE, order.rows, weights_TC, out_TE, out_TE.stride(0),
        CHOSEN=chosen, SIZE=hidden, ADD=residual_TE is not None,
        BLOCK=_COMBINE_BLOCK, num_warps=4, **options,
    )  # fmt: skip
    return out_TE


def _descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _loop(plan: FewPlan | GroupedPlan) -> dict[str, int]:
    return {"BLOCK_K": plan.block_k, "STAGES": plan.num_stages, "num_warps": plan.num_warps}
