"""The choice of experts, one program per token: scores, the best groups, the best experts.

Experts lie in a tile of [groups, experts of a group], both padded to powers of two. The best are
taken out one after another, so that all differ, and of equal ones the lowest id comes first; NaN
scores count as minus infinity.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.api import Routing
from nanovllm_core.kernels import next_power_of_2

NO_ID = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-0x80000000)
"""Below the key of every number."""
_EXPERTS_PER_WARP = 1024
"""With one warp nothing is exchanged through shared memory."""


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, logits_stride,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALE: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """See `nanovllm_core.api.Routing`, whose fields are the constants."""
    if DEPENDENT:
        gdc_launch_dependents()
    ids, is_there = tile_of_experts(NUM_EXPERTS, NUM_GROUPS, BLOCK_GROUPS, BLOCK_EXPERTS)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + ids, mask=is_there, other=0.0)
    if DEPENDENT:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    logits = tl.load(
        logits_ptr + token * logits_stride + ids, mask=is_there, other=float("-inf")
    ).to(tl.float32)
    first = token * (TOP_K + NUM_SHARED)
    choose_experts(
        logits, bias, ids, is_there, weights_ptr + first, ids_ptr + first,
        NUM_EXPERTS, TOP_K, SCALE, SOFTMAX, RENORMALIZE,
        NUM_GROUPS, TOP_GROUPS, BEST_TWO, NUM_SHARED, BLOCK_SHARED,
    )  # fmt: skip


@triton.jit
def tile_of_experts(
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
):  # fmt: skip
    """The ids of all experts [groups, experts of a group], and which of them are there."""
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups, members = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_EXPERTS)
    is_there = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    return groups[:, None] * GROUP_SIZE + members[None, :], is_there


@triton.jit
def choose_experts(
    logits, bias, ids, is_there, weights_ptr, ids_ptr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALE: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    NUM_SHARED: tl.constexpr, BLOCK_SHARED: tl.constexpr,
):  # fmt: skip
    """Store the weights and ids of one token's experts, from its logits in the tile `ids`."""
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = tl.div_rn(scores, tl.sum(tl.sum(scores, axis=1), axis=0))
    else:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))

    choice = scores
    if bias is not None:
        choice += bias
    choice = tl.where(is_there & (choice == choice), choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        groups_there = tl.arange(0, ids.shape[0]) < NUM_GROUPS
        is_kept = _group_ranks(choice, groups_there, BEST_TWO, TOP_GROUPS) < TOP_GROUPS
        choice = tl.where(is_kept[:, None], choice, float("-inf"))

    SIZE: tl.constexpr = ids.shape[0] * ids.shape[1]
    ids, scores = tl.reshape(ids, (SIZE,)), tl.reshape(scores, (SIZE,))
    is_there = tl.reshape(is_there, (SIZE,))
    ids = tl.where(is_there, ids, NO_ID)
    ranks = _ranks_of_best(tl.reshape(choice, (SIZE,)), ids, is_there, TOP_K)
    is_chosen = ranks < TOP_K
    if RENORMALIZE:
        # As the reference: 0 and no NaN where all scores underflow.
        scores = tl.div_rn(scores, tl.sum(tl.where(is_chosen, scores, 0.0), axis=0) + 1e-20)
    tl.store(weights_ptr + ranks, scores * SCALE, mask=is_chosen)
    tl.store(ids_ptr + ranks, ids, mask=is_chosen)
    if NUM_SHARED > 0:
        shared = tl.arange(0, BLOCK_SHARED)
        places, is_shared = TOP_K + shared, shared < NUM_SHARED
        tl.store(weights_ptr + places, tl.full(shared.shape, 1.0, tl.float32), mask=is_shared)
        tl.store(ids_ptr + places, NUM_EXPERTS + shared, mask=is_shared)


@triton.jit
def _group_ranks(choice, is_there, BEST_TWO: tl.constexpr, COUNT: tl.constexpr):
    """The ranks of the COUNT best groups, by their best score or by the sum of their two best."""
    score = tl.max(choice, axis=1)
    if BEST_TWO:
        members = tl.arange(0, choice.shape[1])[None, :]
        first = tl.min(tl.where(choice == score[:, None], members, choice.shape[1]), axis=1)
        score += tl.max(tl.where(members == first[:, None], float("-inf"), choice), axis=1)
    return _ranks_of_best(score, tl.arange(0, choice.shape[0]), is_there, COUNT)


@triton.jit
def _ranks_of_best(x, ids, is_there, COUNT: tl.constexpr):
    """The ranks of the COUNT largest, equal ones by their ids; COUNT for all others.

    One after another is found, and taken out, by the order of its bits: as an integer the first is
    found in one instruction of a warp.
    """
    keys = tl.where(is_there, in_order_of_bits(x), TAKEN)
    ranks = tl.full(x.shape, COUNT, tl.int32)
    for rank in tl.static_range(COUNT):
        is_best = keys == tl.max(keys, axis=0)
        is_first = ids == tl.min(tl.where(is_best, ids, NO_ID), axis=0)
        ranks = tl.where(is_first, rank, ranks)
        keys = tl.where(is_first, TAKEN, keys)
    return ranks


@triton.jit
def in_order_of_bits(x):
    """Float32 -> int32 in the same order, and the bits of such an integer -> those of the float."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def run_route(
    logits_TN: Tensor, routing: Routing, bias_N: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """See `KernelSet.route`; `options` are those of `launch_options`."""
    num_tokens, num_experts = logits_TN.shape
    weights_TC, ids_TC = empty_choice(logits_TN, routing)
    constants = routing_constants(num_experts, routing)
    size = constants["BLOCK_GROUPS"] * constants["BLOCK_EXPERTS"]
    route_kernel[(num_tokens,)](
        logits_TN, bias_N, weights_TC, ids_TC, logits_TN.stride(0),
        **constants, num_warps=max(size // _EXPERTS_PER_WARP, 1), **options,
    )  # fmt: skip
    return weights_TC, ids_TC


def empty_choice(x_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Room for the weights and ids of each token's experts."""
    shape = (len(x_TX), routing.num_chosen)
    return x_TX.new_empty(shape, dtype=torch.float32), x_TX.new_empty(shape, dtype=torch.int32)


def routing_constants(num_experts: int, routing: Routing) -> dict[str, Any]:
    """The rule as constants of a kernel."""
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "SCALE": routing.scale,
        "SOFTMAX": routing.scoring == "softmax",
        "RENORMALIZE": routing.renormalize,
        "NUM_GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "BEST_TWO": routing.group_score == "top2",
        "NUM_SHARED": routing.num_shared,
        "BLOCK_GROUPS": next_power_of_2(routing.num_groups),
        "BLOCK_EXPERTS": next_power_of_2(num_experts // routing.num_groups),
        "BLOCK_SHARED": next_power_of_2(max(routing.num_shared, 1)),
    }
