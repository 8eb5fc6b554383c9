"""A product of a few rows, in Gluon: its weights go from memory straight to the tensor cores.

`linear.tile_linear_kernel` brings both operands through shared memory, and waits before it loads
any. Here each warp has a part of the inputs, and loads weights, 16 bytes to a thread, in the layout
that the tensor cores read, before it waits for the kernel before. Rows lie on the narrow side of
the instruction, which takes eight. The warps of a program add their sums once, at its end.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# Triton is untyped, and a kernel's parameters are traced, not typed.
# ruff: noqa: RUF005 - Triton's functions cannot unpack a tuple

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_M = gl.constexpr(8)
"""Rows of the instruction."""


@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride, out_stride,
    X_UNIT: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr, ADD: gl.constexpr, DEPENDENT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """BLOCK_N weight rows per program, whole; BLOCK_K inputs are a step of a warp.

    num_rows <= BLOCK_M. HELD steps of weights are on their way at a time. Arguments and results are
    otherwise those of `linear.tile_linear_kernel`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (INPUTS + WARPS * BLOCK_K - 1) // (WARPS * BLOCK_K)
    SPAN: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, BLOCK_M]
    )
    # A thread has eight inputs behind each other: the two operands agree on their places.
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, product, 8)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if DEPENDENT:
        gdc_launch_dependents()
    first = gl.program_id(0) * SPAN
    index = along(1, BLOCK_N, weight_layout)
    offset = (index % SPAN) * INPUTS + (index // SPAN) * (OUTPUTS * INPUTS)
    exists = first + index % SPAN < OUTPUTS
    weight_ptrs = weight_ptr + first.to(gl.int64) * INPUTS + offset
    weight_columns = along(0, WARPS, weight_layout) * BLOCK_K + along(2, BLOCK_K, weight_layout)
    weights = ()
    for step in gl.static_range(HELD):
        weights = weights + (step_of(weight_ptrs, weight_columns, exists, step, INPUTS, BLOCK_K),)
    if bias_ptr is not None:
        part = gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, product)))
        output = first + part % SPAN
        bias_ptrs = bias_ptr + output + (part // SPAN) * OUTPUTS
        bias = gl.load(bias_ptrs, mask=output < OUTPUTS, other=0.0).to(gl.float32)
    row = along(2, BLOCK_M, x_layout)
    live = row < num_rows
    x_ptrs = x_ptr + row * (x_stride * X_UNIT)
    x_columns = along(0, WARPS, x_layout) * BLOCK_K + along(1, BLOCK_K, x_layout)
    if DEPENDENT:
        gdc_wait()

    y = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, product)
    for step in gl.static_range(STEPS):
        x = step_of(x_ptrs, x_columns, live, step, INPUTS, BLOCK_K)
        if step + HELD < STEPS:
            later = step_of(weight_ptrs, weight_columns, exists, step + HELD, INPUTS, BLOCK_K)
            weights = weights + (later,)
        y = mma_v2(weights[step], x, y)
    y = gl.sum(y, axis=0)
    if bias_ptr is not None:
        y += gl.expand_dims(bias, 1)

    if GATED:  # gate and up are rounded, as where they pass between kernels
        halves = gl.reshape(y.to(dtype).to(gl.float32), [2, SPAN, BLOCK_M])
        gate, up = gl.split(gl.permute(halves, (1, 2, 0)))
        z = gate
        if GELU:  # see `linear.activated`, which Gluon cannot call
            z = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
        y = gate / (1.0 + gl.exp(-z)) * up
    outputs = first + gl.expand_dims(gl.arange(0, SPAN, gl.SliceLayout(1, y.type.layout)), 1)
    rows = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, y.type.layout)), 0)
    mask = (outputs < OUTPUTS) & (rows < num_rows)
    out_ptrs = out_ptr + rows * out_stride + outputs
    if ADD:
        y += gl.load(out_ptrs, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptrs, y.to(dtype), mask=mask)


@gluon.jit
def along(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, ... SIZE - 1 along one of a layout's three axes, and one place along the others."""
    LOW: gl.constexpr = 1 if AXIS == 0 else 0
    HIGH: gl.constexpr = 1 if AXIS == 2 else 2
    numbers = gl.arange(0, SIZE, gl.SliceLayout(LOW, gl.SliceLayout(HIGH, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(numbers, LOW), HIGH)


@gluon.jit
def step_of(
    ptrs, columns, exists, step: gl.constexpr, INPUTS: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """A step's columns of rows: zeros beyond INPUTS, and where there is no row."""
    WIDTH: gl.constexpr = gl.num_warps() * BLOCK_K
    if (step + 1) * WIDTH > INPUTS:
        exists = exists & (columns < INPUTS - step * WIDTH)
    return gl.load(ptrs + step * WIDTH + columns, mask=exists, other=0.0)
