"""FlashAttention-2 (Dao 2023) over packed queries, keys and values: prompts of latent attention.

Keys and values are those of each head, computed for the call; a key may be longer than a value.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_attention_triton.prefill_kernels import find_row_block, fold_tile


@triton.jit(do_not_specialize=["num_seqs", "lse_stride_head"])
def packed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    key_start_ptr,
    num_seqs,
    log2_scale,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    FRONT: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_M queries of one head of one sequence. Grid: (heads, row blocks of all).

    Row blocks are numbered as `find_row_block` says; one that no sequence has returns at once. A
    key's columns are multiplied in two parts, FRONT, a power of two, and REST more, or 192 columns
    would be padded to 256; a part is padded to its block (FRONT to 16 at least). CAUSAL: the last
    query sees all keys, the one before it one key less; else each sees all. Nothing is read of
    other sequences. `log2_scale`, positive, is the softmax scale times log2(e). A query that sees
    no key gets 0, and a log-sum-exp of -inf; `lse_ptr` is written WITH_LSE, in the natural base.
    """
    head = tl.program_id(0)
    seq, query_start, query_len, first_row = find_row_block(
        tl.program_id(1), query_start_ptr, num_seqs, 1, BLOCK_M
    )
    if first_row < 0:
        return
    key_start = tl.load(key_start_ptr + seq)
    key_len = tl.load(key_start_ptr + seq + 1) - key_start

    BLOCK_F: tl.constexpr = max(FRONT, 16)
    front = tl.arange(0, BLOCK_F)
    rest = tl.arange(0, BLOCK_R)
    values = tl.arange(0, BLOCK_V)
    rows = first_row + tl.arange(0, BLOCK_M)
    real = (rows < query_len)[:, None]
    tokens = (query_start + rows).to(tl.int64)
    q_rows = q_ptr + tokens[:, None] * q_stride_token + head * q_stride_head
    q_front = tl.load(q_rows + front[None, :], mask=real & (front < FRONT)[None, :], other=0.0)
    q_rest = tl.load(q_rows + FRONT + rest[None, :], mask=real & (rest < REST)[None, :], other=0.0)

    # A query sees the keys before `bounds`; every query of the block those before `seen_by_all`.
    bounds = tl.full([BLOCK_M], key_len, tl.int32)
    end = key_len
    seen_by_all = key_len
    if CAUSAL:
        bounds = rows + (key_len - query_len + 1)
        end = tl.minimum(tl.maximum(first_row + BLOCK_M + key_len - query_len, 0), key_len)
        seen_by_all = first_row + (key_len - query_len + 1)
    whole_end = tl.minimum(tl.cdiv(end, BLOCK_N), key_len // BLOCK_N) * BLOCK_N

    keys = tl.arange(0, BLOCK_N)
    k_head = k_ptr + key_start.to(tl.int64) * k_stride_token + head * k_stride_head
    v_head = v_ptr + key_start.to(tl.int64) * v_stride_token + head * v_stride_head
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in tl.range(0, whole_end, BLOCK_N):
        places = (start + keys).to(tl.int64)[:, None]
        k_rows = k_head + places * k_stride_token
        k_front = _load_whole(k_rows + front[None, :], front, FRONT, BLOCK_F)
        scores = tl.dot(q_front, tl.trans(k_front), input_precision="ieee")
        if REST > 0:
            k_rest = _load_whole(k_rows + FRONT + rest[None, :], rest, REST, BLOCK_R)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        v_rows = v_head + places * v_stride_token
        v = _load_whole(v_rows + values[None, :], values, VALUE_SIZE, BLOCK_V)
        if CAUSAL:  # noqa: SIM102 - decided when compiled, unlike the next
            if start + BLOCK_N > seen_by_all:
                visible = start + keys[None, :] < bounds[:, None]
                scores = tl.where(visible, scores, float("-inf"))
        acc, denominator, peak = fold_tile(acc, denominator, peak, scores, v, log2_scale)
    if whole_end < end:
        places = (whole_end + keys).to(tl.int64)[:, None]
        live = (whole_end + keys < key_len)[:, None]
        k_rows = k_head + places * k_stride_token
        v_rows = v_head + places * v_stride_token
        k_front = tl.load(k_rows + front[None, :], mask=live & (front < FRONT)[None, :], other=0.0)
        scores = tl.dot(q_front, tl.trans(k_front), input_precision="ieee")
        if REST > 0:
            mask = live & (rest < REST)[None, :]
            k_rest = tl.load(k_rows + FRONT + rest[None, :], mask=mask, other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        v = tl.load(v_rows + values[None, :], mask=live & (values < VALUE_SIZE)[None, :], other=0.0)
        visible = whole_end + keys[None, :] < tl.minimum(bounds, key_len)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        acc, denominator, peak = fold_tile(acc, denominator, peak, scores, v, log2_scale)

    mass = tl.where(denominator > 0.0, denominator, 1.0)
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = out_ptr + tokens[:, None] * out_stride_token + head * out_stride_head
    tl.store(out_rows + values[None, :], out, mask=real & (values < VALUE_SIZE)[None, :])
    if WITH_LSE:
        LN2: tl.constexpr = 0.6931471805599453
        lse = (peak + tl.log2(mass)) * LN2
        lse_row = lse_ptr + head.to(tl.int64) * lse_stride_head
        tl.store(lse_row + tokens, lse, mask=rows < query_len)


@triton.jit
def _load_whole(pointers, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of keys that all exist, without a mask where its columns do too."""
    if BLOCK == SIZE:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    return tile
