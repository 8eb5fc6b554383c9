"""Row blocks whose keys are split: the items that programs attend, and the merge of their results.

Each program of a split block leaves a partial result, and a second kernel merges them in the order
of the splits. The last program of a block could merge them, as `decode_kernel` does; but it would
read all results alone: on an H200 two splits of 64 rows took it 25 us.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from nanovllm_attention_triton.decode_kernels import within_head
from nanovllm_attention_triton.split_plan import (
    FIRST_ROW,
    MOST_SPLITS,
    NUM_SPLITS,
    QUERY_LEN,
    QUERY_START,
    SEQ,
    SEQ_LEN,
    SPLIT,
)


@triton.jit
def load_item(items_ptr, item, item_capacity):
    """(sequence, first query, queries, keys, first row, split, splits) of an item."""
    item_ptr = items_ptr + item
    return (
        tl.load(item_ptr + SEQ * item_capacity),
        tl.load(item_ptr + QUERY_START * item_capacity),
        tl.load(item_ptr + QUERY_LEN * item_capacity),
        tl.load(item_ptr + SEQ_LEN * item_capacity),
        tl.load(item_ptr + FIRST_ROW * item_capacity),
        tl.load(item_ptr + SPLIT * item_capacity),
        tl.load(item_ptr + NUM_SPLITS * item_capacity),
    )


@triton.jit
def load_num_splits(items_ptr, item, item_capacity):
    """The splits of an item's block, read again: a loop over tiles need not keep them."""
    return tl.load(items_ptr + NUM_SPLITS * item_capacity + item)


@triton.jit
def split_range(begin, end, split, num_splits, BLOCK_N: tl.constexpr):
    """The first and the end of the tiles that a split attends to, of keys from `begin` to `end`.

    A tile begins at `begin`. The last tile may go beyond `end`, and a split may have none.
    """
    size = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
    begin = begin + split * size
    return begin, begin + size


@triton.jit
def store_part(
    result, lse, partial_ptr, lse_ptr, item, kv_head, num_kv_heads, real,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the result of a split [BLOCK_M, BLOCK_D], normalised, of the rows that are `real`.

    `lse` is base 2, -inf for a row that saw no key. Parts are [item, KV head, BLOCK_M, BLOCK_D].
    """
    rows = tl.arange(0, BLOCK_M)
    slots = (item * num_kv_heads + kv_head).to(tl.int64) * BLOCK_M + rows
    tl.store(lse_ptr + slots, lse, mask=real)
    offsets = slots[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(partial_ptr + offsets, result, mask=real[:, None])


@triton.jit(do_not_specialize=["program_rows"])
def merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    items_ptr,
    first_items_ptr,
    counts_ptr,
    out_stride_token,
    out_stride_head,
    item_capacity,
    program_rows,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Average the splits of `program_rows` rows, weighted by the mass of each, ROWS rows at a time.

    Grid: (KV heads, pieces of a row block, row blocks). The plan is read before the wait: it was
    written before the kernel of the parts began. Loads bypass the L1, which may hold what was
    there in the layer or the step before.
    """
    kv_head = tl.program_id(0)
    block = tl.program_id(2)
    num_splits = 0
    first_item = 0
    if block < tl.load(counts_ptr + 1, cache_modifier=".cg"):
        first_item = tl.load(first_items_ptr + block, cache_modifier=".cg")
        num_splits = tl.load(
            items_ptr + NUM_SPLITS * item_capacity + first_item, cache_modifier=".cg"
        )
    if DEPENDENT:
        # Where nothing is merged, too: the kernel behind this one waits for this one alone.
        gdc_wait()
    if num_splits < 2:
        return
    item_ptr = items_ptr + first_item
    query_start = tl.load(item_ptr + QUERY_START * item_capacity, cache_modifier=".cg")
    num_rows = tl.load(item_ptr + QUERY_LEN * item_capacity, cache_modifier=".cg") * GROUP
    first_row = tl.load(item_ptr + FIRST_ROW * item_capacity, cache_modifier=".cg")
    begin = tl.program_id(1) * program_rows
    end = tl.minimum(begin + program_rows, num_rows - first_row)
    # Row 0 of the block's first split, and the distance to row 0 of the next split.
    first_slot = (first_item * tl.num_programs(0) + kv_head).to(tl.int64) * BLOCK_M
    split_slots = tl.num_programs(0) * BLOCK_M
    dims = tl.arange(0, BLOCK_D)
    for place in range(begin, end, ROWS):
        lanes = place + tl.arange(0, ROWS)
        real = lanes < end
        lse_row = lse_ptr + first_slot + lanes
        splits = tl.arange(0, MOST_SPLITS)
        all_lse = tl.load(
            lse_row[None, :] + splits[:, None] * split_slots,
            mask=(splits < num_splits)[:, None] & real[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        peak = tl.max(all_lse, 0)
        # Rows without mass keep clear of inf - inf; their zeros stay zeros.
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(tl.exp2(all_lse - peak[None, :]), 0)
        peak += tl.log2(tl.where(mass > 0.0, mass, 1.0))
        part = partial_ptr + (first_slot + lanes)[:, None] * BLOCK_D + dims[None, :]
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for split in tl.range(0, num_splits, loop_unroll_factor=4):
            lse_ptrs = lse_row + split * split_slots
            lse = tl.load(lse_ptrs, mask=real, other=float("-inf"), cache_modifier=".cg")
            parts = part + split * split_slots * BLOCK_D
            result = tl.load(parts, mask=real[:, None], other=0.0, cache_modifier=".cg")
            acc += result * tl.exp2(lse - peak)[:, None]
        rows = first_row + lanes
        tokens = (query_start + rows // GROUP).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        out_rows = out_ptr + (tokens * out_stride_token + heads * out_stride_head)[:, None]
        out_mask = within_head(real, HEAD_SIZE, BLOCK_D)
        tl.store(out_rows + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
