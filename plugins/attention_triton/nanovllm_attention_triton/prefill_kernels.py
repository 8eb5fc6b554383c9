"""The prefill kernel: FlashAttention-2 (Dao 2023) over packed queries and paged keys and values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nanovllm_attention_triton.decode_kernels import (
    LOG2_E,
    block_offsets,
    load_block_ids,
    tanh,
    within_head,
)
from nanovllm_attention_triton.split_kernels import (
    load_item,
    load_num_splits,
    split_range,
    store_part,
)


@triton.jit(do_not_specialize=["num_seqs"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_seqs,
    log2_scale,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    table_stride,
    stride_block,
    stride_token,
    stride_head,
    items_ptr,
    counts_ptr,
    partial_ptr,
    partial_lse_ptr,
    item_capacity,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend BLOCK_M rows of one KV head of one sequence. Grid: (KV heads, row blocks or items).

    A row is a query of one head; the heads of a group lie side by side, so that a block spans few
    positions and wastes little beyond the diagonal. A sequence's queries are its last positions.
    The row blocks of all sequences are numbered as `find_row_block` says, so that the grid follows
    from their tokens and their number; one that no sequence has returns at once. Where `items_ptr`
    is not None, a program attends an item of a plan instead, which may be a part of the keys of a
    row block: see `split_plan`. Cache blocks are named by ids.

    Tiles that lie wholly within the sequence are loaded unmasked: by the copy engine where
    `k_desc` and `v_desc` describe the caches (a cache block holds whole tiles), else (None) by
    pointers. The last, partial tile is masked, so nothing is read beyond `seq_len`. `log2_scale`,
    positive, is the softmax scale times log2(e), applied once, in fp32. A query that sees no key
    gets 0, and a log-sum-exp of -inf.

    A query at position p sees the keys from p - LEFT to p + RIGHT; -1 sets no bound, so RIGHT 0 is
    the causal mask. Tiles that no row of the block sees are not read. SOFT_CAP: above 0, the cap of
    the scaled scores. BLOCK_D: the head size rounded up to a power of two; the columns beyond are
    read as zeros.
    """
    tl.static_assert(items_ptr is None or not WITH_LSE, "splits have no merged log-sum-exp")
    kv_head = tl.program_id(0)
    if items_ptr is None:
        seq, query_start, query_len, first_row = find_row_block(
            tl.program_id(1), query_start_ptr, num_seqs, GROUP, BLOCK_M
        )
        if first_row < 0:
            return
        seq_len = tl.load(seq_lens_ptr + seq)
    else:
        if DEPENDENT:
            gdc_launch_dependents()
        item = tl.program_id(1)
        if item >= tl.load(counts_ptr):
            return
        seq, query_start, query_len, seq_len, first_row, split, num_splits = load_item(
            items_ptr, item, item_capacity
        )
    context = seq_len - query_len

    rows = first_row + tl.arange(0, BLOCK_M)
    positions = context + rows // GROUP
    tokens = (query_start + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    real = rows < query_len * GROUP
    dims = tl.arange(0, BLOCK_D)
    real_head = within_head(real, HEAD_SIZE, BLOCK_D)
    q_offsets = tokens * q_stride_token + heads * q_stride_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=real_head, other=0.0)

    # Keys that some row sees are at `begin` or later and before `end`; keys that every row sees at
    # `seen_from` or later and before `seen_by_all`; `whole_end` ends the tiles within the sequence.
    begin = 0
    first_key = None
    end = seq_len
    seen_by_all = seq_len
    if LEFT >= 0 or RIGHT >= 0:
        last_row = tl.minimum(first_row + BLOCK_M, query_len * GROUP) - 1
    if RIGHT >= 0:
        end = tl.minimum(tl.maximum(context + last_row // GROUP + (1 + RIGHT), 0), seq_len)
        seen_by_all = context + first_row // GROUP + (1 + RIGHT)
    if LEFT >= 0:
        first_key = tl.maximum(context + first_row // GROUP - LEFT, 0)
        begin = first_key // BLOCK_N * BLOCK_N
        seen_from = context + last_row // GROUP - LEFT
    whole_end = tl.minimum(tl.cdiv(end, BLOCK_N), seq_len // BLOCK_N) * BLOCK_N
    if items_ptr is not None:
        begin, split_end = split_range(begin, end, split, num_splits, BLOCK_N)
        end = tl.minimum(end, split_end)
        whole_end = tl.maximum(tl.minimum(whole_end, split_end), begin)

    table_row = table_ptr + seq.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    if SOFT_CAP > 0.0:
        # Scores become tanh(scores * cap_scale), and log2_scale what takes these to base 2.
        cap_scale = log2_scale / (SOFT_CAP * LOG2_E)
        log2_scale = SOFT_CAP * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = tl.arange(0, BLOCK_N)
    block_ids = load_block_ids(table_row, begin, whole_end, BLOCK_SIZE, BLOCK_N, first_key)
    for start in tl.range(begin, whole_end, BLOCK_N):
        if k_desc is not None:
            block_id = block_ids.to(tl.int32)
            k = k_desc.load([block_id, start % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            v = v_desc.load([block_id, start % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            offsets = block_offsets(
                block_ids, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N, first_key
            )
            k = _load_tile(k_head + offsets[:, None] + dims[None, :], HEAD_SIZE, BLOCK_D)
            v = _load_tile(v_head + offsets[:, None] + dims[None, :], HEAD_SIZE, BLOCK_D)
        block_ids = load_block_ids(
            table_row, start + BLOCK_N, whole_end, BLOCK_SIZE, BLOCK_N, first_key
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFT_CAP > 0.0:
            scores = tanh(scores * cap_scale, k.dtype)
        if RIGHT >= 0:  # noqa: SIM102 - decided when compiled, unlike the next
            if start + BLOCK_N > seen_by_all:
                visible = start + keys[None, :] <= positions[:, None] + RIGHT
                scores = tl.where(visible, scores, float("-inf"))
        if LEFT >= 0:  # noqa: SIM102
            if start < seen_from:
                visible = start + keys[None, :] >= positions[:, None] - LEFT
                scores = tl.where(visible, scores, float("-inf"))
        acc, denominator, peak = fold_tile(acc, denominator, peak, scores, v, log2_scale)
    if whole_end < end:
        live = whole_end + keys < end
        if LEFT >= 0 and BLOCK_SIZE % BLOCK_N != 0:
            live = live & (whole_end + keys >= first_key)
        block_ids = load_block_ids(table_row, whole_end, end, BLOCK_SIZE, BLOCK_N)
        offsets = block_offsets(
            block_ids, whole_end, stride_block, stride_token, BLOCK_SIZE, BLOCK_N
        )
        live_head = within_head(live, HEAD_SIZE, BLOCK_D)
        k = tl.load(k_head + offsets[:, None] + dims[None, :], mask=live_head, other=0.0)
        v = tl.load(v_head + offsets[:, None] + dims[None, :], mask=live_head, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFT_CAP > 0.0:
            scores = tanh(scores * cap_scale, k.dtype)
        visible = live[None, :]
        if RIGHT >= 0:
            visible = visible & (whole_end + keys[None, :] <= positions[:, None] + RIGHT)
        if LEFT >= 0:
            visible = visible & (whole_end + keys[None, :] >= positions[:, None] - LEFT)
        scores = tl.where(visible, scores, float("-inf"))
        acc, denominator, peak = fold_tile(acc, denominator, peak, scores, v, log2_scale)

    mass = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc / mass[:, None]
    if items_ptr is not None:
        item = tl.program_id(1)
        num_splits = load_num_splits(items_ptr, item, item_capacity)
        if num_splits > 1:
            store_part(
                acc, peak + tl.log2(mass), partial_ptr, partial_lse_ptr, item, kv_head,
                tl.num_programs(0), real, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        real_head = real_head & (num_splits == 1)
    out_offsets = tokens * out_stride_token + heads * out_stride_head
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out, mask=real_head)
    if WITH_LSE:
        LN2: tl.constexpr = 0.6931471805599453
        lse = (peak + tl.log2(mass)) * LN2
        tl.store(lse_ptr + heads.to(tl.int64) * lse_stride_head + tokens, lse, mask=real)


@triton.jit
def find_row_block(
    row_block, query_start_ptr, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The sequence of a block of rows, its first query and their number, and the block's first row.

    Sequence s has the blocks from `rows before s // BLOCK_M + s` on: at least as many as its rows
    need, since it is one more than the whole blocks that end in it. Its last rows, which see the
    most keys, are its first block; a block that is over has a first row below 0. Rows before the
    first sequence count for nothing. A captured step has room for many sequences, and those that
    are not there are empty and last: their blocks are found without the bisection.
    """
    base = tl.load(query_start_ptr)
    rows = (tl.load(query_start_ptr + num_seqs) - base) * GROUP
    empty = row_block - rows // BLOCK_M
    low = tl.full([], 0, tl.int32)
    high = num_seqs
    if empty > 0 and empty < num_seqs:  # noqa: SIM102 - the load is for these alone
        if (tl.load(query_start_ptr + empty) - base) * GROUP == rows:
            low = empty
            high = empty + 1
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + middle) - base) * GROUP // BLOCK_M + middle
        low = tl.where(start <= row_block, middle, low)
        high = tl.where(start <= row_block, high, middle)
    query_start = tl.load(query_start_ptr + low)
    query_len = tl.load(query_start_ptr + low + 1) - query_start
    number = row_block - ((query_start - base) * GROUP // BLOCK_M + low)
    return low, query_start, query_len, (tl.cdiv(query_len * GROUP, BLOCK_M) - 1 - number) * BLOCK_M


@triton.jit
def _load_tile(pointers, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """A whole tile [BLOCK_N, BLOCK_D], without a mask where the head size fills it."""
    if BLOCK_D == HEAD_SIZE:
        tile = tl.load(pointers)
    else:
        inside = tl.arange(0, BLOCK_D) < HEAD_SIZE
        tile = tl.load(pointers, mask=inside[None, :], other=0.0)
    return tile


@triton.jit
def fold_tile(acc, denominator, peak, scores, v, log2_scale):
    """Fold a tile's unscaled scores (-inf: not seen) and values into the running softmax.

    The scale and the peak meet each score in one multiply-add.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
    # A row that has seen no key yet keeps clear of inf - inf.
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * log2_scale - anchor[:, None])
    rescale = tl.exp2(peak - anchor)
    denominator = denominator * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, denominator, new_peak
