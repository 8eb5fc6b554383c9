"""The decode kernel: attend the items of the plan, merge the parts of a row.

An item is a chunk of a row's context, see `decode_plan`. Each is attended once per block of query
heads of one KV head ("flash decoding", Dao et al. 2023). A row of one chunk writes its output at
once; of several, each program leaves a partial result and the last to arrive (an integer ticket)
merges them in the order of the chunks, so the result does not depend on who came last.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, first=None):
    """The 64-bit block ids of TILE tokens from `start`: one scalar where a block holds the tile.

    Where blocks before that of token `first` may belong to another sequence, tokens before it are
    read as that one again; see `block_offsets`.

    A block id times its stride overflows 32 bits in any cache beyond 2^31 elements. Nothing is read
    for tokens from `end` on. Callers load a tile's ids one round early, into a loop-carried value:
    an id loaded in the round that needs it costs Triton's pipeliner a stage of the K and V loads.
    """
    if BLOCK_SIZE % TILE == 0:
        block_ids = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, TILE)
        if first is not None:
            tokens = tl.maximum(tokens, first)
        block_ids = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    return block_ids.to(tl.int64)


@triton.jit
def block_offsets(
    block_ids, start, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    first=None,
):  # fmt: skip
    """Element offsets [TILE], 64-bit, of the tokens from `start`, whose blocks are `block_ids`.

    `first` as in `load_block_ids`: a block that holds the whole tile is the sequence's own.
    """
    lanes = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        slots = start % BLOCK_SIZE + lanes
    else:
        tokens = start + lanes
        if first is not None:
            tokens = tl.maximum(tokens, first)
        slots = tokens % BLOCK_SIZE
    return block_ids * stride_block + slots.to(tl.int64) * stride_token


@triton.jit
def within_head(rows, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mask of a tile [rows, BLOCK_D]: its rows, and where a head size is padded its columns."""
    mask = rows[:, None]
    if BLOCK_D > HEAD_SIZE:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_SIZE)[None, :]
    return mask


@triton.jit
def tanh(x, DTYPE: tl.constexpr):
    """The hyperbolic tangent in fp32, of scores whose operands are DTYPE.

    Of half precision to 3e-7, far less than what the rounding of these operands changes; of float32
    to a few roundings also where it is small.
    """
    if DTYPE.primitive_bitwidth == 16:
        result = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # e^(2x)
    else:
        result = exact_tanh(x)
    return result


@triton.jit
def exact_tanh(x):
    """The hyperbolic tangent in fp32, to a few roundings also where it is small."""
    size = tl.abs(x)
    decay = tl.exp2(size * -2.8853900817779268)  # e^(-2 |x|)
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    # The first terms of the series, where 1 - decay would cancel.
    series = size * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    result = tl.where(size < 0.2, series, large)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def attend_tile(
    q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One round of the online softmax over the keys that are `live`.

    Returns the new (peak, denominator, acc). Where no key may be live yet, the peak must be finite.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
    if SOFT_CAP > 0.0:
        scores = tanh(scores / (SOFT_CAP * LOG2_E), k.dtype) * (SOFT_CAP * LOG2_E)
    scores = tl.where(live[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    rescale = tl.exp2(peak - new_peak)
    denominator = denominator * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_peak, denominator, acc


@triton.jit
def decode_kernel(
    q_ptr,
    q_stride_row,
    q_stride_head,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    partial_ptr,
    lse_ptr,
    tickets_ptr,
    log2_scale,
    out_stride_row,
    out_stride_head,
    table_stride,
    stride_block,
    stride_token,
    stride_head,
    item_capacity,
    programs_per_item,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    PARTIAL_HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend one item with PARTIAL_HEADS query heads of one KV head, in a tile of BLOCK_H.

    Programs of one item are neighbours: its KV heads lie side by side in a block. `log2_scale` is
    the softmax scale times log2(e), applied once, to the scores in fp32. Partials are
    [item, KV head, head block, PARTIAL_HEADS, BLOCK_D] fp32 and normalised; `lse` is base 2.
    BLOCK_D is the head size rounded up to a power of two; the columns beyond are read as zeros and
    never stored. WINDOWED: an item may begin within a tile. SOFT_CAP: above 0, the cap of the
    scaled scores. DEPENDENT: see `nanovllm_core.kernels.dependent_launch`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    item = tl.program_id(0) // programs_per_item
    head_block = tl.program_id(0) % programs_per_item
    # Loaded before the test, so that the two do not wait for each other; see `decode_qkv_kernel`
    # for why the plan may be read before the wait, past the L1.
    row = tl.load(items_ptr + item, cache_modifier=".cg")
    begin = tl.load(items_ptr + item_capacity + item, cache_modifier=".cg")
    end = tl.load(items_ptr + 2 * item_capacity + item, cache_modifier=".cg")
    first_item = tl.load(items_ptr + 3 * item_capacity + item, cache_modifier=".cg")
    num_chunks = tl.load(items_ptr + 4 * item_capacity + item, cache_modifier=".cg")
    first_block_id = tl.load(items_ptr + 5 * item_capacity + item, cache_modifier=".cg")
    if item >= tl.load(num_items_ptr, cache_modifier=".cg"):
        return
    if DEPENDENT:
        gdc_wait()

    kv_head = head_block // HEAD_BLOCKS
    lanes = tl.arange(0, BLOCK_H)
    members = (head_block % HEAD_BLOCKS) * PARTIAL_HEADS + lanes
    real = members < GROUP
    if HEAD_BLOCKS > 1:
        real = real & (lanes < PARTIAL_HEADS)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, BLOCK_D)
    q_offsets = row.to(tl.int64) * q_stride_row + heads[:, None] * q_stride_head + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=within_head(real, HEAD_SIZE, BLOCK_D), other=0.0)

    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    first_tile = begin
    if WINDOWED:
        first_tile = begin // TILE * TILE
    if BLOCK_SIZE % TILE == 0:
        block_ids = first_block_id.to(tl.int64)
    else:
        block_ids = load_block_ids(table_row, first_tile, end, BLOCK_SIZE, TILE)
    for start in tl.range(first_tile, end, TILE):
        live = start + tl.arange(0, TILE) < end
        if WINDOWED:
            live = live & (start + tl.arange(0, TILE) >= begin)
        live_head = within_head(live, HEAD_SIZE, BLOCK_D)
        offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, TILE)
        block_ids = load_block_ids(table_row, start + TILE, end, BLOCK_SIZE, TILE)
        kv_offsets = offsets[:, None] + dims[None, :]
        k = tl.load(k_head + kv_offsets, mask=live_head, other=0.0)
        v = tl.load(v_head + kv_offsets, mask=live_head, other=0.0)
        peak, denominator, acc = attend_tile(
            q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
        )
    store_result(
        acc, peak, denominator, out_ptr + row.to(tl.int64) * out_stride_row,
        partial_ptr, lse_ptr, tickets_ptr, item, row, first_item, num_chunks, head_block,
        out_stride_head, programs_per_item,
        HEAD_BLOCKS, GROUP, BLOCK_H, PARTIAL_HEADS, MERGE, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip


@triton.jit
def store_result(
    acc,
    peak,
    denominator,
    out_row,
    partial_ptr,
    lse_ptr,
    tickets_ptr,
    item,
    row,
    first_item,
    num_chunks,
    head_block,
    out_stride_head,
    programs_per_item,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTIAL_HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the output of an item that is its whole row, else its part; the last one merges."""
    lanes = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    members = (head_block % HEAD_BLOCKS) * PARTIAL_HEADS + lanes
    real = members < GROUP
    if HEAD_BLOCKS > 1:
        real = real & (lanes < PARTIAL_HEADS)
    # Only a padded row has no mass: its zeros stay zeros.
    result = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    if num_chunks == 1:
        heads = (head_block // HEAD_BLOCKS) * GROUP + members
        out_offsets = heads[:, None] * out_stride_head + dims[None, :]
        out_mask = within_head(real, HEAD_SIZE, BLOCK_D)
        tl.store(out_row + out_offsets, result.to(out_row.dtype.element_ty), mask=out_mask)
    else:
        slot = (item * programs_per_item + head_block).to(tl.int64) * PARTIAL_HEADS
        tl.store(lse_ptr + slot + lanes, peak + tl.log2(denominator), mask=real)
        partial_offsets = (slot + lanes[:, None]) * BLOCK_D + dims[None, :]
        tl.store(partial_ptr + partial_offsets, result, mask=real[:, None])
        # Every thread's stores come before the ticket, every merge load after it.
        tl.debug_barrier()
        ticket = tickets_ptr + row * programs_per_item + head_block
        arrived = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            tl.store(ticket, 0)
            tl.debug_barrier()
            _merge_chunks(
                partial_ptr,
                lse_ptr,
                out_row,
                first_item,
                num_chunks,
                head_block,
                out_stride_head,
                programs_per_item,
                HEAD_BLOCKS,
                GROUP,
                BLOCK_H,
                PARTIAL_HEADS,
                MERGE,
                HEAD_SIZE,
                BLOCK_D,
            )


@triton.jit
def _merge_chunks(
    partial_ptr,
    lse_ptr,
    out_row,
    first_item,
    num_chunks,
    head_block,
    out_stride_head,
    programs_per_item,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTIAL_HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Average a row's chunks, weighted by the mass of each, MERGE chunks at a time."""
    lanes = tl.arange(0, PARTIAL_HEADS)
    dims = tl.arange(0, BLOCK_D)
    members = (head_block % HEAD_BLOCKS) * PARTIAL_HEADS + lanes
    real = members < GROUP
    peak = tl.full([PARTIAL_HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([PARTIAL_HEADS], tl.float32)
    acc = tl.zeros([PARTIAL_HEADS, BLOCK_D], tl.float32)
    for base in range(0, num_chunks, MERGE):
        chunks = base + tl.arange(0, MERGE)
        live = chunks < num_chunks
        slots = ((first_item + chunks) * programs_per_item + head_block).to(
            tl.int64
        ) * PARTIAL_HEADS
        slots = slots[:, None] + lanes[None, :]
        mask = live[:, None] & real[None, :]
        # .cg reads the L2, where the other programs' stores are; an L1 line might be stale.
        lse = tl.load(lse_ptr + slots, mask=mask, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + slots[:, :, None] * BLOCK_D + dims[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        # Lanes that are not real heads never see a finite mass; 0 keeps them free of inf - inf.
        anchor = tl.where(real, new_peak, 0.0)
        rescale = tl.exp2(peak - anchor)
        weights = tl.exp2(lse - anchor[None, :])
        mass = mass * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = new_peak
    result = acc / tl.where(real, mass, 1.0)[:, None]
    heads = (head_block // HEAD_BLOCKS) * GROUP + members
    out_offsets = heads[:, None] * out_stride_head + dims[None, :]
    out_mask = within_head(real, HEAD_SIZE, BLOCK_D)
    tl.store(out_row + out_offsets, result.to(out_row.dtype.element_ty), mask=out_mask)
