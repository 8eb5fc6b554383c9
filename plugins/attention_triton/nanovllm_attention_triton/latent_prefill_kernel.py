"""Prompts over latent rows: the queries of all heads attend to one row per token.

With absorbed projections, as in decode (`latent_kernels`): a row is the key of all heads, and its
front their value. For long prompts that is more arithmetic than with keys and values of each head;
but no length must be known on the host, so that a step of it can be captured.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nanovllm_attention_triton.decode_kernels import block_offsets, load_block_ids
from nanovllm_attention_triton.prefill_kernels import find_row_block, fold_tile
from nanovllm_attention_triton.split_kernels import (
    load_item,
    load_num_splits,
    split_range,
    store_part,
)


@triton.jit(do_not_specialize=["num_seqs"])
def latent_prefill_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_seqs,
    log2_scale,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    stride_block,
    stride_token,
    items_ptr,
    counts_ptr,
    partial_ptr,
    partial_lse_ptr,
    item_capacity,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend BLOCK_M queries of one sequence. Grid: the blocks of all, as `find_row_block` says, or
    the items of a plan, each of which may be a part of a block's keys (`split_plan`).

    A query is one of a head; the heads of a token lie side by side, so that a block has few tokens
    and wastes little beyond the diagonal. A cached row has VALUE_SIZE columns that are its value,
    and REST_SIZE more; BLOCK_V and BLOCK_R are these sizes rounded up to powers of two, whose
    further columns are read as zeros. Nothing is read behind the last key that a query of the
    block sees. `log2_scale`, positive, is the softmax scale times log2(e).
    """
    if items_ptr is None:
        seq, query_start, query_len, first_query = find_row_block(
            tl.program_id(0), query_start_ptr, num_seqs, NUM_HEADS, BLOCK_M
        )
        if first_query < 0:
            return
        seq_len = tl.load(seq_lens_ptr + seq)
    else:
        if DEPENDENT:
            gdc_launch_dependents()
        item = tl.program_id(0)
        if item >= tl.load(counts_ptr):
            return
        seq, query_start, query_len, seq_len, first_query, split, num_splits = load_item(
            items_ptr, item, item_capacity
        )
    num_queries = query_len * NUM_HEADS
    context = seq_len - query_len
    begin = 0
    end = context + (tl.minimum(first_query + BLOCK_M, num_queries) - 1) // NUM_HEADS + 1
    if items_ptr is not None:
        begin, split_end = split_range(begin, end, split, num_splits, BLOCK_N)
        end = tl.minimum(end, split_end)

    queries = first_query + tl.arange(0, BLOCK_M)
    real = queries < num_queries
    tokens = (query_start + queries // NUM_HEADS).to(tl.int64)
    heads = queries % NUM_HEADS
    positions = context + queries // NUM_HEADS
    values = tl.arange(0, BLOCK_V)
    rest = tl.arange(0, BLOCK_R)
    value_mask = values[None, :] < VALUE_SIZE
    rest_mask = rest[None, :] < REST_SIZE
    q = q_ptr + (tokens * q_stride_token + heads * q_stride_head)[:, None]
    q_value = tl.load(q + values[None, :], mask=real[:, None] & value_mask, other=0.0)
    q_rest = tl.load(q + (VALUE_SIZE + rest)[None, :], mask=real[:, None] & rest_mask, other=0.0)

    table_row = table_ptr + seq.to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    keys = tl.arange(0, BLOCK_N)
    block_ids = load_block_ids(table_row, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        live = start + keys < end
        offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        block_ids = load_block_ids(table_row, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        rows = cache_ptr + offsets[:, None]
        value = tl.load(rows + values[None, :], mask=live[:, None] & value_mask, other=0.0)
        scores = tl.dot(q_value, tl.trans(value), input_precision="ieee")
        if REST_SIZE > 0:
            key_rest = tl.load(
                rows + (VALUE_SIZE + rest)[None, :], mask=live[:, None] & rest_mask, other=0.0
            )
            scores = tl.dot(q_rest, tl.trans(key_rest), scores, input_precision="ieee")
        scores = tl.where(start + keys[None, :] <= positions[:, None], scores, float("-inf"))
        acc, denominator, peak = fold_tile(acc, denominator, peak, scores, value, log2_scale)

    # A part behind the last key of a row has no mass.
    mass = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc / mass[:, None]
    value_mask = real[:, None] & value_mask
    if items_ptr is not None:
        item = tl.program_id(0)
        num_splits = load_num_splits(items_ptr, item, item_capacity)
        if num_splits > 1:
            store_part(
                acc, peak + tl.log2(mass), partial_ptr, partial_lse_ptr, item, 0, 1, real,
                BLOCK_M, BLOCK_V,
            )  # fmt: skip
        value_mask = value_mask & (num_splits == 1)
    out_rows = out_ptr + (tokens * out_stride_token + heads * out_stride_head)[:, None]
    tl.store(out_rows + values[None, :], acc.to(out_ptr.dtype.element_ty), mask=value_mask)
