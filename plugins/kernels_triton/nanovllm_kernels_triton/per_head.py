"""Each head's own product for few rows, where the time is that of streaming the weights once.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.kernels import cdiv, next_power_of_2

MOST_WEIGHTS = 2**23
"""Weights of all heads times rows: each row reads them anew, most of them from the L2 cache."""
MOST_INPUTS = 1024
"""A program holds whole rows of a head's weight."""
_BLOCK_WEIGHTS = 8192
"""Weights of a program: 64 for each thread, all in flight at once."""


def is_for_few_rows(x_THX: Tensor, weight_HOI: Tensor) -> bool:
    """Whether `run_linear_per_head` is for such rows and weights."""
    return (
        len(x_THX) * weight_HOI.numel() <= MOST_WEIGHTS
        and weight_HOI.shape[2] <= MOST_INPUTS
        and x_THX.stride(2) == 1
    )


@triton.jit
def per_head_kernel(
    x_ptr, weight_ptr, out_ptr,
    x_row_stride, x_head_stride, weight_head_stride, weight_out_stride, weight_in_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, REST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a head and a row per program; see `KernelSet.linear_per_head`.

    Grid: (tiles of outputs, heads, rows). The first tile's program copies the REST numbers that
    are behind the inputs.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    places = outputs[:, None] * weight_out_stride + inputs[None, :] * weight_in_stride
    weight = tl.load(
        weight_ptr + head.to(tl.int64) * weight_head_stride + places,
        mask=(outputs < OUTPUTS)[:, None] & (inputs < INPUTS)[None, :],
        other=0.0,
    )
    tl.debug_barrier()  # or the compiler would put off loads until others have been used
    if DEPENDENT:
        gdc_wait()
    x_ptr += row * x_row_stride + head * x_head_stride
    x = tl.load(x_ptr + inputs, mask=inputs < INPUTS, other=0.0)
    y = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    out_ptr += (row * tl.num_programs(1) + head) * (OUTPUTS + REST)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=outputs < OUTPUTS)
    if REST > 0:  # noqa: SIM102 - the one is the compiler's, the other the program's
        if tl.program_id(0) == 0:
            rest = tl.arange(0, BLOCK_REST)
            copied = tl.load(x_ptr + INPUTS + rest, mask=rest < REST, other=0.0)
            tl.store(out_ptr + OUTPUTS + rest, copied, mask=rest < REST)


def run_linear_per_head(x_THX: Tensor, weight_HOI: Tensor, options: dict[str, Any]) -> Tensor:
    """See `KernelSet.linear_per_head`; `options` are those of `launch_options`."""
    (rows, heads, width), (_, outputs, inputs) = x_THX.shape, weight_HOI.shape
    rest, block_k = width - inputs, next_power_of_2(inputs)
    block_n = min(_BLOCK_WEIGHTS // block_k, next_power_of_2(outputs))
    out_THX = x_THX.new_empty((rows, heads, outputs + rest))
    per_head_kernel[(cdiv(outputs, block_n), heads, rows)](
        x_THX, weight_HOI, out_THX, x_THX.stride(0), x_THX.stride(1), *weight_HOI.stride(),
        OUTPUTS=outputs, INPUTS=inputs, REST=rest,
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_REST=next_power_of_2(max(rest, 1)),
        num_warps=4, **options,
    )  # fmt: skip
    return out_THX
