"""Row-wise kernels: one program per row, or per piece of a row, and every element read once.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels_triton.linear import normed


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
def silu_and_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One piece of a row per program."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
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
