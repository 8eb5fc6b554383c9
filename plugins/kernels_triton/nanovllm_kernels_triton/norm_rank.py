"""Norm, a router's logits and the rank of each of many experts, for one token.

As in `norm_route`, each program norms the row and multiplies it by a few rows of the router's
weight, and logits pass through memory in which they are their own flags. Here every program polls
all of them, and counts the experts that come before its own. That is one comparison, where one
program that chooses takes the best out one after another. The sum of the chosen scores, by which
some routers divide, is left to the down projection, which reads all of them; it also empties the
memory. No program ends before all have started, so all must be resident at once.

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
from nanovllm_core.kernels import cdiv, next_power_of_2
from nanovllm_kernels_triton.norm_route import (
    NormRoutePlan,
    choose_norm_route,
    hold_router,
    pass_logits,
    poll_logits,
)
from nanovllm_kernels_triton.route import empty_choice, in_order_of_bits

FEWEST_EXPERTS = 128
"""On an H100 a layer of 128 experts, of which 8 are chosen, took 1.1 µs less than by `norm_route`;
one of 64, of which 6 are, as long; and four tokens 3 µs longer, as so many programs poll."""
_WARPS_OF_PROCESSOR = 8
"""That are resident on a multiprocessor, whatever registers they take: 65,536 / (255 * 32)."""


def choose_norm_rank(
    rows: int, hidden: int, num_experts: int, itemsize: int, routing: Routing, processors: int
) -> NormRoutePlan | None:
    """The plan for x [rows, hidden] on so many multiprocessors; None means `norm_route`.

    The best groups are not found by a comparison, and shared experts, whose weight is 1, have no
    part in a sum that the others are divided by.
    """
    plan = choose_norm_route(rows, num_experts, hidden, itemsize)
    has_other_rule = routing.top_groups < routing.num_groups or (
        routing.renormalize and routing.num_shared > 0
    )
    if plan is None or rows != 1 or num_experts < FEWEST_EXPERTS or has_other_rule:
        return None
    warps = cdiv(num_experts, plan.block_n) * plan.num_warps
    return plan if warps <= processors * _WARPS_OF_PROCESSOR else None


@triton.jit
def norm_rank_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr,
    normed_ptr, passed_ptr, weights_ptr, ids_ptr,
    EPS: tl.constexpr, INPUTS: tl.constexpr, EXACT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NUM_SHARED: tl.constexpr,
    SCALE: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PASS_ONLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `norm_route_kernel`, for one token and a rule without groups, with these differences.

    RENORMALIZE: the weights are scores, neither divided nor scaled. The logits stay in
    `passed_ptr` [NUM_EXPERTS]. PASS_ONLY: nothing more is done than to pass them.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    columns, ids = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_EXPERTS)
    own_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias, own_bias = None, None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + ids, mask=ids < NUM_EXPERTS, other=0.0)
        own_bias = tl.load(bias_ptr + own_ids, mask=own_ids < NUM_EXPERTS, other=0.0)
    weight, norm_weight = hold_router(
        weight_ptr, norm_weight_ptr, own_ids, columns, NUM_EXPERTS, INPUTS
    )
    if DEPENDENT:
        gdc_wait()
    x, own_logits = pass_logits(
        x_ptr, weight, norm_weight, passed_ptr, own_ids, columns,
        EPS, NUM_EXPERTS, INPUTS, EXACT,
    )  # fmt: skip
    if PASS_ONLY:
        return
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + columns, x, mask=columns < INPUTS)
        if NUM_SHARED > 0:
            shared = tl.arange(0, BLOCK_SHARED)
            places, is_shared = TOP_K + shared, shared < NUM_SHARED
            tl.store(weights_ptr + places, tl.full(shared.shape, 1.0, tl.float32), mask=is_shared)
            tl.store(ids_ptr + places, NUM_EXPERTS + shared, mask=is_shared)

    logits = poll_logits(passed_ptr, ids, ids < NUM_EXPERTS)
    best = tl.max(in_order_of_bits(logits), axis=0)  # an integer's is found in one instruction
    best = in_order_of_bits(best.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
    scores = _scores(logits, best, SOFTMAX)
    own_scores = _scores(own_logits, best, SOFTMAX)
    if SOFTMAX:  # noqa: SIM102 - a constant, by which the rest is compiled or is not
        # Without a bias it changes no order but of scores that it makes equal, and it cancels out
        # where the chosen are divided by their sum.
        if bias_ptr is not None or not RENORMALIZE:
            total = tl.sum(scores, axis=0)
            scores, own_scores = tl.div_rn(scores, total), tl.div_rn(own_scores, total)
    order = _order(scores, bias)[None, :]
    own_order = _order(own_scores, own_bias)[:, None]
    is_before = (order > own_order) | ((order == own_order) & (ids[None, :] < own_ids[:, None]))
    ranks = tl.sum((is_before & (ids < NUM_EXPERTS)[None, :]).to(tl.int32), axis=1)
    if not RENORMALIZE:
        own_scores *= SCALE
    is_chosen = (ranks < TOP_K) & (own_ids < NUM_EXPERTS)
    tl.store(weights_ptr + ranks, own_scores, mask=is_chosen)
    tl.store(ids_ptr + ranks, own_ids, mask=is_chosen)


@triton.jit
def _scores(logits, best, SOFTMAX: tl.constexpr):
    """Of a softmax before its division; those of no expert are 0."""
    if SOFTMAX:
        return tl.exp(logits - best)
    else:  # Triton compiles what stands behind a branch too
        return tl.div_rn(1.0, 1.0 + tl.exp(-logits))


@triton.jit
def _order(scores, bias):
    """What the largest are chosen by; NaN comes last."""
    if bias is not None:
        scores += bias
    return tl.where(scores == scores, scores, float("-inf"))


def run_norm_rank(
    plan: NormRoutePlan, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_NE: Tensor,
    routing: Routing, bias_N: Tensor | None, passed: Tensor, options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weights [1, C] (as of `norm_rank_kernel`), ids [1, C] and rms_norm(x) [1, E].

    `passed` is of `empty_logits`, and full afterwards.
    """
    hidden, num_experts = x_TE.shape[1], len(weight_NE)
    weights_TC, ids_TC = empty_choice(x_TE, routing)
    normed_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    # The interpreter runs one program after another, and the first would wait for the others.
    for pass_only in (True, False) if triton.knobs.runtime.interpret else (False,):
        norm_rank_kernel[(cdiv(num_experts, plan.block_n),)](
            x_TE, norm_weight_E, weight_NE, bias_N,
            normed_TE, passed, weights_TC, ids_TC,
            EPS=eps, INPUTS=hidden, EXACT=routing.exact_logits,
            **rule_constants(num_experts, routing),
            BLOCK_N=plan.block_n, BLOCK_K=next_power_of_2(hidden), PASS_ONLY=pass_only,
            num_warps=plan.num_warps, **options,
        )  # fmt: skip
    return weights_TC, ids_TC, normed_TE


def rule_constants(num_experts: int, routing: Routing) -> dict[str, Any]:
    """A rule without groups as constants of `norm_rank_kernel`."""
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "NUM_SHARED": routing.num_shared,
        "SCALE": routing.scale,
        "SOFTMAX": routing.scoring == "softmax",
        "RENORMALIZE": routing.renormalize,
        "BLOCK_EXPERTS": next_power_of_2(num_experts),
        "BLOCK_SHARED": next_power_of_2(max(routing.num_shared, 1)),
    }
