"""Rows of queries in the prompt kernels for Hopper: copied, weighed and stored by a consumer."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.
# ruff: noqa: RUF059 - a tuple stands for a structure, of which each function takes what it needs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from nanovllm_attention_triton.hopper_work import ROWS

PRODUCER_REGISTERS = gl.constexpr(24)
CONSUMER_REGISTERS = gl.constexpr(240)


@gluon.jit
def weigh(scores, peak, denominator, log2_scale):
    """The weights of a tile's scores, and the running softmax with them.

    Returns the weights, the factor of what was summed before, the new peak and denominator. The
    scale and the peak meet each score in one multiply-add.
    """
    new_peak = gl.maximum(peak, gl.max(scores, 1) * log2_scale)
    # A row that has seen no key yet keeps clear of inf - inf.
    anchor = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(scores * log2_scale - anchor[:, None])
    rescale = gl.exp2(peak - anchor)
    denominator = denominator * rescale + gl.sum(weights, 1)
    return weights, rescale, new_peak, denominator


@gluon.jit
def wait_for_keys(k_full, count, there):
    """Wait for the keys of tile number `count` of all that the program loads, if it is `there`."""
    STAGES: gl.constexpr = k_full.type.shape[0]
    mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1, pred=there)


@gluon.jit
def clear_values(v, length):
    """Zero a tile's rows from `length` on, which may hold anything, in shared memory.

    Every consumer does, and writes what the others write.
    """
    PART: gl.constexpr = 32
    layout: gl.constexpr = wide_layout(v.shape[1])
    rows = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(v.shape[0] // PART):
        if (part + 1) * PART > length:
            values = v.slice(part * PART, PART)
            live = part * PART + rows < length
            values.store(gl.where(live[:, None], values.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def copy_queries(
    q, q_ptr, q_stride_token, q_stride_head, work, CONSUMER: gl.constexpr, GROUP: gl.constexpr
):
    """Begin to copy the consumer's rows of a block of rows."""
    offsets, real = row_offsets(work, q_stride_token, q_stride_head, CONSUMER, GROUP, q.shape[1])
    async_copy.async_copy_global_to_shared(q, q_ptr + offsets, mask=real)
    async_copy.commit_group()


@gluon.jit
def row_offsets(
    work, stride_token, stride_head, CONSUMER: gl.constexpr, GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Offsets [ROWS, HEAD_SIZE] of the consumer's rows, and which of them [ROWS, 1] there are."""
    kv_head, first_row, query_start, query_len, seq_len, num_tiles = work
    layout: gl.constexpr = wide_layout(HEAD_SIZE)
    dims = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, layout))
    rows = first_row + ROWS * CONSUMER + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = (query_start + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    starts = tokens * stride_token + heads * stride_head
    return starts[:, None] + dims[None, :], (rows < query_len * GROUP)[:, None]


@gluon.jit
def store_rows(
    acc, staging, out_ptr, stride_token, stride_head, work, CONSUMER: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Store the consumer's results, by way of shared memory of their shape, `staging`."""
    staging.store(acc.to(out_ptr.dtype.element_ty))
    HEAD_SIZE: gl.constexpr = staging.shape[1]
    offsets, real = row_offsets(work, stride_token, stride_head, CONSUMER, GROUP, HEAD_SIZE)
    gl.store(out_ptr + offsets, staging.load(wide_layout(HEAD_SIZE)), mask=real)


@gluon.constexpr_function
def wide_layout(head_size):
    """Threads that load and store rows in pieces of 8 elements."""
    return gl.BlockedLayout([1, 8], [32 * 8 // head_size, head_size // 8], [4, 1], [1, 0])
