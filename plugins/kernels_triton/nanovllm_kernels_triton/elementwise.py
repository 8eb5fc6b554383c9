"""Row-wise kernels: one program per row, or per piece of a row, and every element read once.

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

from nanovllm_core.kernels import cdiv, next_power_of_2
from nanovllm_kernels_triton.linear import activated, normed

_ACTIVATION_BLOCK = 1024


@triton.jit
def rms_normed(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """A row's norm, behind whose SIZE numbers there are zeros."""
    wide = x.to(tl.float32)
    return normed(x, tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + EPS), weight)


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride,
    EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program; see `KernelSet.rms_norm` for the two roundings."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    out = rms_normed(x, weight, SIZE, EPS)
    tl.store(out_ptr + row * SIZE + columns, out, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_kernel(
    parts_ptr, residual_ptr, weight_ptr, out_ptr, num_tokens, residual_stride,
    PARTS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: the residual and its parts, summed in their order and rounded once; and
    the sum's norm. `parts_ptr` [PARTS, num_tokens, SIZE] float32.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_wait()
    residual_ptrs = residual_ptr + row * residual_stride + columns
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        part_ptrs = parts_ptr + (part * num_tokens + row) * SIZE + columns
        total += tl.load(part_ptrs, mask=mask, other=0.0)
    x = (total + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, x, mask=mask)
    out = rms_normed(x, weight, SIZE, EPS)
    tl.store(out_ptr + row * SIZE + columns, out, mask=mask)


@triton.jit
def norm_add_norm_kernel(
    x_ptr, weight_ptr, residual_ptr, next_weight_ptr, out_ptr, x_stride, residual_stride,
    EPS: tl.constexpr, NEXT_EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: the residual and the norm of x, summed and rounded; the sum's norm."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    next_weight = tl.load(next_weight_ptr + columns, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_wait()
    residual_ptrs = residual_ptr + row * residual_stride + columns
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    addend = rms_normed(x, weight, SIZE, EPS).to(tl.float32)
    total = (addend + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, total, mask=mask)
    out = rms_normed(total, next_weight, SIZE, NEXT_EPS)
    tl.store(out_ptr + row * SIZE + columns, out, mask=mask)


@triton.jit
def activate_and_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One piece of a row per program; SiLU, or GELU by tanh."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    out = activated(gate, GELU) * up
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def embed_kernel(
    ids_ptr, weight_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One piece of one id's row per program."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(weight_ptr + row * SIZE + columns, mask=mask)
    tl.store(out_ptr + token * SIZE + columns, values, mask=mask)


def run_norm_add_norm(
    x_TE: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    residual_TE: Tensor,
    next_weight_E: Tensor,
    next_eps: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """See `PostNormKernels.norm_add_norm`; `options` are those of the launch."""
    num_tokens, size = x_TE.shape
    normed_TE = torch.empty_like(residual_TE, memory_format=torch.contiguous_format)
    block = next_power_of_2(size)
    norm_add_norm_kernel[(num_tokens,)](
        x_TE, norm_weight_E, residual_TE, next_weight_E, normed_TE,
        x_TE.stride(0), residual_TE.stride(0),
        EPS=eps, NEXT_EPS=next_eps, SIZE=size, BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
        # A multiply-add would skip the rounding between the first norm's weight and the sum.
        enable_fp_fusion=False,
        **options,
    )  # fmt: skip
    return residual_TE, normed_TE


def run_activate_and_mul(
    gate_up_T2F: Tensor, options: dict[str, Any], *, gelu: bool = False
) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up, of each row's halves -> [T, F]."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty((num_tokens, size))
    activate_and_mul_kernel[(num_tokens, cdiv(size, _ACTIVATION_BLOCK))](
        gate_up_T2F, out_TF, gate_up_T2F.stride(0),
        SIZE=size, BLOCK=_ACTIVATION_BLOCK, GELU=gelu, num_warps=4, **options,
    )  # fmt: skip
    return out_TF
