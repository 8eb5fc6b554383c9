"""Norm, a router's logits and the choice of experts in one kernel, for few rows.

Each of three kernels would take less time than the gap between two. Here each program norms a row
and multiplies it by a few rows of the router's weight. The last program of a token chooses its
experts, and polls the logits of the others until they are there. They are their own flags: the
memory in which they pass holds no number before, and none after. That is faster than a ticket,
which takes a fence, and two more ways to the L2 cache. No other program waits, so none must be
resident.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.api import Routing
from nanovllm_core.kernels import cdiv, next_power_of_2
from nanovllm_kernels_triton.linear import normed
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS
from nanovllm_kernels_triton.route import (
    choose_experts,
    empty_choice,
    routing_constants,
    tile_of_experts,
)

MOST_ROWS = 8
"""The largest number of rows for which one kernel is used."""
_WARP_BYTES = 4096
"""Bytes of a row that one warp holds in registers. One warp needs no barriers to choose experts."""
_MOST_WARPS = 4
MOST_EXPERTS = 1024
"""Of the memory in which logits pass."""

EMPTY = tl.constexpr(-1)
"""The bits of a NaN that no logit has: that which arithmetic makes is another."""
_NAN = tl.constexpr(0x7FC00000)


@dataclass(frozen=True, slots=True)
class NormRoutePlan:
    """`block_n` experts per program."""

    block_n: int
    num_warps: int


def choose_norm_route(
    rows: int, num_experts: int, hidden: int, itemsize: int
) -> NormRoutePlan | None:
    """The plan for x [rows, hidden]; None means three kernels."""
    num_warps = max(next_power_of_2(hidden) * itemsize // _WARP_BYTES, 1)
    if rows > MOST_ROWS or num_warps > _MOST_WARPS or num_experts > MOST_EXPERTS:
        return None
    rows_of_each = cdiv(num_experts, MULTIPROCESSORS)
    return NormRoutePlan(next_power_of_2(rows_of_each), num_warps)


@triton.jit
def norm_route_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr,
    normed_ptr, passed_ptr, weights_ptr, ids_ptr, x_stride,
    EPS: tl.constexpr, INPUTS: tl.constexpr, EXACT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCALE: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """See `RoutingKernels.norm_route`: BLOCK_N experts of a token per program, in whole rows.

    Constants from NUM_EXPERTS on are the fields of `Routing`. EXACT: logits are not rounded to the
    dtype of x. `passed_ptr` int32 [T, NUM_EXPERTS] passes their bits to the program that chooses;
    EMPTY before, and after.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight, norm_weight = hold_router(
        weight_ptr, norm_weight_ptr, rows, columns, NUM_EXPERTS, INPUTS
    )
    if DEPENDENT:
        gdc_wait()
    passed_ptr += token * NUM_EXPERTS
    x, _ = pass_logits(
        x_ptr + token * x_stride, weight, norm_weight, passed_ptr, rows, columns,
        EPS, NUM_EXPERTS, INPUTS, EXACT,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * INPUTS + columns, x, mask=columns < INPUTS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        ids, is_there = tile_of_experts(NUM_EXPERTS, NUM_GROUPS, BLOCK_GROUPS, BLOCK_EXPERTS)
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + ids, mask=is_there, other=0.0)
        logits = poll_logits(passed_ptr, ids, is_there)
        tl.debug_barrier()  # no warp polls any more
        take_out_logits(passed_ptr, NUM_EXPERTS)
        first = token * (TOP_K + NUM_SHARED)
        choose_experts(
            logits, bias, ids, is_there, weights_ptr + first, ids_ptr + first,
            NUM_EXPERTS, TOP_K, SCALE, SOFTMAX, RENORMALIZE,
            NUM_GROUPS, TOP_GROUPS, BEST_TWO, NUM_SHARED, BLOCK_SHARED,
        )  # fmt: skip


@triton.jit
def hold_router(
    weight_ptr, norm_weight_ptr, rows, columns, NUM_EXPERTS: tl.constexpr, INPUTS: tl.constexpr
):
    """Some rows of the router's weight, and the norm's weight, on their way to registers."""
    inside = columns < INPUTS
    weight_ptrs = weight_ptr + rows[:, None] * INPUTS + columns[None, :]
    mask = (rows < NUM_EXPERTS)[:, None] & inside[None, :]
    weight = tl.load(weight_ptrs, mask=mask, other=0.0)
    norm_weight = tl.load(norm_weight_ptr + columns, mask=inside, other=0.0)
    tl.debug_barrier()  # or the compiler would put off loads until others have been used
    return weight, norm_weight


@triton.jit
def pass_logits(
    x_ptr, weight, norm_weight, passed_ptr, rows, columns,
    EPS: tl.constexpr, NUM_EXPERTS: tl.constexpr, INPUTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Norm one row of x, and pass its logits for some rows of the router: both are returned."""
    x = tl.load(x_ptr + columns, mask=columns < INPUTS, other=0.0)
    square = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=0)
    x = normed(x, tl.rsqrt(square / INPUTS + EPS), norm_weight)
    logits = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if not EXACT:
        logits = logits.to(x.dtype).to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    tl.store(passed_ptr + rows, tl.where(bits == EMPTY, _NAN, bits), mask=rows < NUM_EXPERTS)
    return x, logits


@triton.jit
def poll_logits(passed_ptr, ids, is_there):
    """The logits of a token, once all have passed; minus infinity beside them."""
    passed = tl.load(passed_ptr + ids, mask=is_there, other=0, volatile=True)
    while tl.max((passed == EMPTY).to(tl.int32), axis=None) != 0:
        passed = tl.load(passed_ptr + ids, mask=is_there, other=0, volatile=True)
    return tl.where(is_there, passed.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def take_out_logits(passed_ptr, NUM_EXPERTS: tl.constexpr):
    """Of a token: the memory in which they have passed is empty again."""
    BLOCK: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    places = tl.arange(0, BLOCK)
    empty = tl.full(places.shape, EMPTY, tl.int32)
    tl.store(passed_ptr + places, empty, mask=places < NUM_EXPERTS)


def empty_logits(device: torch.device) -> Tensor:
    """The memory in which logits pass, of one stream of work; each operation leaves it as it is."""
    shape = (MOST_ROWS, MOST_EXPERTS)
    return torch.full(shape, EMPTY.value, dtype=torch.int32, device=device)


def run_norm_route(
    plan: NormRoutePlan, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_NE: Tensor,
    routing: Routing, bias_N: Tensor | None, passed: Tensor, options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `RoutingKernels.norm_route`; `passed` is of `empty_logits`."""
    (num_tokens, hidden), num_experts = x_TE.shape, len(weight_NE)
    weights_TC, ids_TC = empty_choice(x_TE, routing)
    normed_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    norm_route_kernel[(cdiv(num_experts, plan.block_n), num_tokens)](
        x_TE, norm_weight_E, weight_NE, bias_N,
        normed_TE, passed, weights_TC, ids_TC, x_TE.stride(0),
        EPS=eps, INPUTS=hidden, EXACT=routing.exact_logits,
        **routing_constants(num_experts, routing),
        BLOCK_N=plan.block_n, BLOCK_K=next_power_of_2(hidden),
        num_warps=plan.num_warps, **options,
    )  # fmt: skip
    return weights_TC, ids_TC, normed_TE
