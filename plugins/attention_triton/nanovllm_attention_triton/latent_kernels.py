"""Decode over latent rows: one row per token is the key of all heads, and its front their value.

Multi-head latent attention (DeepSeek-V2, 2024) with absorbed projections: a token's row holds its
latent vector and its rotated key, the scores take the whole row and the values are the latent part.
Each row is read from memory once for both products.

The products are transposed: keys, and then columns of the values, are the rows of a tile, and heads
its columns. Hopper's tensor cores multiply at least 64 rows at a time, and as few as 8 columns: 16
heads in the place of the rows would leave three quarters of these idle.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_attention_triton.decode_kernels import block_offsets, load_block_ids


@triton.jit
def latent_decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    partial_ptr,
    lse_ptr,
    log2_scale,
    q_stride_row,
    q_stride_head,
    out_stride_row,
    out_stride_head,
    table_stride,
    stride_block,
    stride_token,
    item_capacity,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    PARTIAL_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend one item of the plan with BLOCK_H heads; HEAD_BLOCKS programs share an item.

    A row has VALUE_SIZE columns that are its value, and REST_SIZE more; BLOCK_V and BLOCK_R are
    these sizes rounded up to powers of two, whose further columns are read as zeros. A row of one
    chunk gets its output here; of several, each chunk leaves a normalised fp32 part [item,
    HEAD_BLOCKS, PARTIAL_HEADS, BLOCK_V] and its log-sum-exp, base 2, for `latent_merge_kernel`.
    `log2_scale` is the softmax scale times log2(e).

    DEPENDENT: see `nanovllm_core.kernels.launch_options`. The plan is read before the wait, as in
    `decode_qkv_kernels.decode_qkv_kernel`; programs without an item end there.
    """
    item = tl.program_id(0) // HEAD_BLOCKS
    head_block = tl.program_id(0) % HEAD_BLOCKS
    # Loaded before the test, so that the two do not wait for each other.
    row = tl.load(items_ptr + item, cache_modifier=".cg").to(tl.int64)
    begin = tl.load(items_ptr + item_capacity + item, cache_modifier=".cg")
    end = tl.load(items_ptr + 2 * item_capacity + item, cache_modifier=".cg")
    num_chunks = tl.load(items_ptr + 4 * item_capacity + item, cache_modifier=".cg")
    first_block_id = tl.load(items_ptr + 5 * item_capacity + item, cache_modifier=".cg")
    if item >= tl.load(num_items_ptr, cache_modifier=".cg"):
        return
    if DEPENDENT:
        gdc_wait()
        # Behind the wait, so that the merge may read the plan before its own.
        gdc_launch_dependents()

    lanes = tl.arange(0, BLOCK_H)
    heads = head_block * BLOCK_H + lanes
    real = heads < NUM_HEADS
    values = tl.arange(0, BLOCK_V)
    rest = tl.arange(0, BLOCK_R)
    value_mask = values[None, :] < VALUE_SIZE
    rest_mask = rest[None, :] < REST_SIZE
    q_rows = q_ptr + row * q_stride_row + heads[:, None] * q_stride_head
    q_value = tl.load(q_rows + values[None, :], mask=real[:, None] & value_mask, other=0.0)
    q_rest = tl.load(
        q_rows + (VALUE_SIZE + rest)[None, :], mask=real[:, None] & rest_mask, other=0.0
    )

    table_row = table_ptr + row * table_stride
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # Summed over the keys of a tile at the end alone: a sum per round would wait for every warp.
    mass = tl.zeros([TILE, BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
    if BLOCK_SIZE % TILE == 0:
        block_ids = first_block_id.to(tl.int64)
    else:
        block_ids = load_block_ids(table_row, begin, end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, end, TILE):
        live = start + tl.arange(0, TILE) < end
        offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, TILE)
        block_ids = load_block_ids(table_row, start + TILE, end, BLOCK_SIZE, TILE)
        rows = cache_ptr + offsets[:, None]
        value = tl.load(rows + values[None, :], mask=live[:, None] & value_mask, other=0.0)
        scores = tl.dot(value, tl.trans(q_value), input_precision="ieee")
        if REST_SIZE > 0:
            key_rest = tl.load(
                rows + (VALUE_SIZE + rest)[None, :], mask=live[:, None] & rest_mask, other=0.0
            )
            scores = tl.dot(key_rest, tl.trans(q_rest), scores, input_precision="ieee")
        scores = tl.where(live[:, None], scores * log2_scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp2(scores - new_peak[None, :])
        rescale = tl.exp2(peak - new_peak)[None, :]
        mass = mass * rescale + weights
        acc = acc * rescale
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc, input_precision="ieee")
        peak = new_peak

    denominator = tl.sum(mass, 0)
    # Only a padded row has no mass: its zeros stay zeros.
    result = tl.trans(acc) / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    if num_chunks == 1:
        out_rows = out_ptr + row * out_stride_row + heads[:, None] * out_stride_head
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_rows + values[None, :], out, mask=real[:, None] & value_mask)
    else:
        slots = (item * HEAD_BLOCKS + head_block).to(tl.int64) * PARTIAL_HEADS + lanes
        tl.store(lse_ptr + slots, peak + tl.log2(denominator), mask=real)
        parts = partial_ptr + slots[:, None] * BLOCK_V + values[None, :]
        tl.store(parts, result, mask=real[:, None])


@triton.jit
def latent_merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    items_ptr,
    out_stride_row,
    out_stride_head,
    item_capacity,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    PARTIAL_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Average the chunks of one row and head over COLUMNS columns, weighted by their mass.

    Grid: (columns of BLOCK_V, heads, rows), flat. CHUNKS are read at a time, in their order.
    The last program of a row could merge them, as `decode_kernel` does; but it would read all parts
    of the row alone, and these are wide.
    """
    PARTS: tl.constexpr = BLOCK_V // COLUMNS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % NUM_HEADS
    row = tl.program_id(0) // (PARTS * NUM_HEADS)
    if DEPENDENT:
        gdc_launch_dependents()
    first_item = tl.load(items_ptr + 6 * item_capacity + row, cache_modifier=".cg")
    num_chunks = tl.load(items_ptr + 4 * item_capacity + first_item, cache_modifier=".cg")
    if DEPENDENT:
        # Also where nothing is merged: who waits for this kernel waits for decode too.
        gdc_wait()
    if num_chunks == 1:
        return
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    first_slot = (first_item * HEAD_BLOCKS + head // BLOCK_H).to(tl.int64) * PARTIAL_HEADS
    first_slot += head % BLOCK_H
    peak = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for base in range(0, num_chunks, CHUNKS):
        chunks = base + tl.arange(0, CHUNKS)
        live = chunks < num_chunks
        slots = first_slot + chunks.to(tl.int64) * (HEAD_BLOCKS * PARTIAL_HEADS)
        lse = tl.load(lse_ptr + slots, mask=live, other=float("-inf"))
        parts = partial_ptr + slots[:, None] * BLOCK_V + columns[None, :]
        part_values = tl.load(parts, mask=live[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(lse - new_peak)
        mass = mass * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(part_values * weights[:, None], 0)
        peak = new_peak
    out = (acc / mass).to(out_ptr.dtype.element_ty)
    out_row = out_ptr + row.to(tl.int64) * out_stride_row + head * out_stride_head
    tl.store(out_row + columns, out, mask=columns < VALUE_SIZE)
