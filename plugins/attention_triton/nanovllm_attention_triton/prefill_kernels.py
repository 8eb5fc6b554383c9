"""The prefill kernel: FlashAttention-2 (Dao 2023) over packed queries and paged keys and values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_attention_triton.decode_kernels import load_pages, page_offsets


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    log2_scale,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    table_stride,
    stride_page,
    stride_token,
    stride_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_M queries of one head of one sequence. Grid: (heads, sequences, query blocks).

    A sequence's queries are its last positions. The last query blocks, which see the most keys,
    come first in the grid, of all sequences alike; a block beyond its sequence's queries returns at
    once. `log2_scale` is the softmax scale times log2(e), applied once, to the scores in fp32. A
    query that sees no key gets 0, and a log-sum-exp of -inf.
    """
    head = tl.program_id(0)
    seq = tl.program_id(1)
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first_query = block * BLOCK_M
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_query

    queries = first_query + tl.arange(0, BLOCK_M)
    positions = first_position + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_SIZE)
    tokens = (query_start + queries).to(tl.int64)
    q_offsets = tokens[:, None] * q_stride_token + head * q_stride_head + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=queries[:, None] < query_len, other=0.0)

    if CAUSAL:
        # Keys that every query of the block sees, and keys that any of them sees.
        seen_by_all = tl.minimum(tl.maximum(first_position + 1, 0), seq_len)
        end = tl.minimum(tl.maximum(first_position + BLOCK_M, 0), seq_len)
    else:
        seen_by_all = seq_len
        end = seq_len
    full_end = (seen_by_all // BLOCK_N) * BLOCK_N

    table_row = table_ptr + seq.to(tl.int64) * table_stride
    kv_head = head // GROUP
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    acc, denominator, peak = _attend(
        acc, denominator, peak, q, k_head, v_head, table_row, positions, 0, full_end,
        log2_scale, stride_page, stride_token, HEAD_SIZE, PAGE, False, CAUSAL, BLOCK_N,
    )  # fmt: skip
    acc, denominator, peak = _attend(
        acc, denominator, peak, q, k_head, v_head, table_row, positions, full_end, end,
        log2_scale, stride_page, stride_token, HEAD_SIZE, PAGE, True, CAUSAL, BLOCK_N,
    )  # fmt: skip

    mass = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc / mass[:, None]
    out_offsets = tokens[:, None] * out_stride_token + head * out_stride_head + dims[None, :]
    mine = queries < query_len
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None])
    if WITH_LSE:
        LN2: tl.constexpr = 0.6931471805599453
        lse = (peak + tl.log2(mass)) * LN2
        tl.store(lse_ptr + head.to(tl.int64) * lse_stride_head + tokens, lse, mask=mine)


@triton.jit
def _attend(
    acc,
    denominator,
    peak,
    q,
    k_head,
    v_head,
    table_row,
    positions,
    begin,
    end,
    log2_scale,
    stride_page,
    stride_token,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the keys from `begin` to `end` into (acc, denominator, peak); MASKED on the edge only.

    Nothing is read beyond `end`, so what unused pages and tails hold does not matter.
    """
    dims = tl.arange(0, HEAD_SIZE)
    pages = load_pages(table_row, begin, end, PAGE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        offsets = page_offsets(pages, start, stride_page, stride_token, PAGE, BLOCK_N)
        pages = load_pages(table_row, start + BLOCK_N, end, PAGE, BLOCK_N)
        kv_offsets = offsets[:, None] + dims[None, :]
        if MASKED:
            k = tl.load(k_head + kv_offsets, mask=keys[:, None] < end, other=0.0)
        else:
            k = tl.load(k_head + kv_offsets)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        if MASKED:
            visible = keys[None, :] < end
            if CAUSAL:
                visible = visible & (keys[None, :] <= positions[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        anchor = new_peak
        if MASKED:
            anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - anchor[:, None])
        rescale = tl.exp2(peak - anchor)
        denominator = denominator * rescale + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(v_head + kv_offsets, mask=keys[:, None] < end, other=0.0)
        else:
            v = tl.load(v_head + kv_offsets)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, denominator, peak
