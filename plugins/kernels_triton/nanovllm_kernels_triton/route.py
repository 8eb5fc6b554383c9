"""The choice of experts, one program per token: scores, the best groups, the best experts.

A place in an order is found by comparing every pair of scores, so that ties go to the lowest id and
all places differ. Experts lie in a tile of [groups, experts of a group], both padded to powers of
two; NaN scores count as minus infinity.

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

_COMPARED = 4096
"""Pairs of scores that a warp compares: 128 for each thread."""


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, logits_stride,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALE: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """See `nanovllm_core.api.Routing`, whose fields are the constants."""
    if DEPENDENT:
        gdc_launch_dependents()
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups, members = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_EXPERTS)
    is_there = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    ids = groups[:, None] * GROUP_SIZE + members[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + ids, mask=is_there, other=0.0)
    if DEPENDENT:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    logits = tl.load(
        logits_ptr + token * logits_stride + ids, mask=is_there, other=float("-inf")
    ).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = tl.div_rn(scores, tl.sum(tl.sum(scores, axis=1), axis=0))
    else:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))

    choice = scores
    if bias_ptr is not None:
        choice += bias
    choice = tl.where(is_there & (choice == choice), choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        is_kept = _group_ranks(choice, BEST_TWO, NUM_GROUPS) < TOP_GROUPS
        choice = tl.where(is_kept[:, None], choice, float("-inf"))

    SIZE: tl.constexpr = BLOCK_GROUPS * BLOCK_EXPERTS
    ids, scores = tl.reshape(ids, (SIZE,)), tl.reshape(scores, (SIZE,))
    is_there = tl.reshape(is_there, (SIZE,))
    ranks = _ranks(tl.reshape(choice, (SIZE,)), ids, is_there)
    is_chosen = is_there & (ranks < TOP_K)
    if RENORMALIZE:
        scores = tl.div_rn(scores, tl.sum(tl.where(is_chosen, scores, 0.0), axis=0))
    places = token * TOP_K + ranks
    tl.store(weights_ptr + places, scores * SCALE, mask=is_chosen)
    tl.store(ids_ptr + places, ids, mask=is_chosen)


@triton.jit
def _ranks(x, ids, is_there):
    """How many of those that are there come before each: a larger x, or as large and a lower id."""
    is_before = (x[None, :] > x[:, None]) | (
        (x[None, :] == x[:, None]) & (ids[None, :] < ids[:, None])
    )
    return tl.sum((is_before & is_there[None, :]).to(tl.int32), axis=1)


@triton.jit
def _group_ranks(choice, BEST_TWO: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """The rank of each group, by its best score or by the sum of its two best."""
    groups = tl.arange(0, choice.shape[0])
    score = tl.max(choice, axis=1)
    if BEST_TWO:
        members = tl.arange(0, choice.shape[1])[None, :]
        first = tl.min(tl.where(choice == score[:, None], members, choice.shape[1]), axis=1)
        score += tl.max(tl.where(members == first[:, None], float("-inf"), choice), axis=1)
    return _ranks(score, groups, groups < NUM_GROUPS)


def run_route(
    logits_TN: Tensor, routing: Routing, bias_N: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """See `KernelSet.route`; `options` are those of `launch_options`."""
    num_tokens, num_experts = logits_TN.shape
    weights_TC = logits_TN.new_empty((num_tokens, routing.top_k), dtype=torch.float32)
    ids_TC = logits_TN.new_empty((num_tokens, routing.top_k), dtype=torch.int32)
    block_groups = triton.next_power_of_2(routing.num_groups)
    block_experts = triton.next_power_of_2(num_experts // routing.num_groups)
    size = block_groups * block_experts
    route_kernel[(num_tokens,)](
        logits_TN, bias_N, weights_TC, ids_TC, logits_TN.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        SCALE=routing.scale,
        SOFTMAX=routing.scoring == "softmax",
        RENORMALIZE=routing.renormalize,
        NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        BEST_TWO=routing.group_score == "top2",
        BLOCK_GROUPS=block_groups,
        BLOCK_EXPERTS=block_experts,
        num_warps=min(max(size * size // _COMPARED, 1), 32),
        **options,
    )  # fmt: skip
    return weights_TC, ids_TC
