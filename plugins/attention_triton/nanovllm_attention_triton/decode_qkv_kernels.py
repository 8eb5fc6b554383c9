"""Decode attention that begins at packed q, k, v: norm, rotation and the store of k and v inside.

Each program norms and rotates its own query heads, which is little beside the keys that it reads.
The newest key and value of a row are those of the step: the programs of its last chunk make them
and keep them in registers, and one of them stores them. No program reads what another one of the
launch writes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_attention_triton.decode_kernels import (
    LOG2_E,
    attend_tile,
    block_offsets,
    load_block_ids,
    store_result,
    tanh,
    within_head,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest number of float32."""


@triton.jit
def rotation_partners(HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """For each of a head's columns the one that it rotates with: itself where it does not rotate.

    The first 2 * HALF columns rotate, those of one half against those of the other.
    """
    dims = tl.arange(0, BLOCK_D)
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    partners = tl.where(dims < 2 * HALF, other, dims)
    if HALF % 8 == 0:
        # Eight columns at a time: the compiler cannot see it behind the choice.
        partners = tl.max_contiguous(tl.multiple_of(partners, 8), 8)
    return partners


@triton.jit
def load_weight(weight_ptr, dims, HEAD_SIZE: tl.constexpr):
    """The norm's weights of columns `dims` in fp32; zeros behind the head."""
    return tl.load(weight_ptr + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)


@triton.jit
def load_rotation(cos_sin_ptr, position, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """(cos, sin) of each column at one position, the sign of sin that of the partner's share."""
    dims = tl.arange(0, BLOCK_D)
    turns = dims < 2 * HALF
    places = tl.where(dims < HALF, dims, dims - HALF)
    row = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    cos = tl.load(row + places, mask=turns, other=1.0)
    sin = tl.load(row + HALF + places, mask=turns, other=0.0)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def norm_and_rotate(
    x, partner, weight, partner_weight, cos, sin, EPS: tl.constexpr, NORM: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Heads [rows, BLOCK_D] in fp32 as `KernelSet.prepare_qkv` makes them, not rounded yet.

    `partner` are the same heads in the order of `rotation_partners`.
    """
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + EPS)[:, None]
        x = x * (scale * weight[None, :])
        partner = partner * (scale * partner_weight[None, :])
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def load_tile(
    k_head, v_head, block_ids, start, begin, end, stride_block, stride_token,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """K and V of TILE tokens from `start`, zeros outside [begin, end), and which are inside."""
    tokens = start + tl.arange(0, TILE)
    live = tokens < end
    if WINDOWED:
        live = live & (tokens >= begin)
    live_head = within_head(live, HEAD_SIZE, BLOCK_D)
    offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, TILE)
    kv_offsets = offsets[:, None] + tl.arange(0, BLOCK_D)[None, :]
    k = tl.load(k_head + kv_offsets, mask=live_head, other=0.0)
    v = tl.load(v_head + kv_offsets, mask=live_head, other=0.0)
    return k, v, live


@triton.jit
def prefetch_tile(
    k_head, v_head, block_ids, start, end, stride_block, stride_token,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for K and V of the tokens from `start`, lines of 128 bytes; none waits for it."""
    LINE: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.cdiv(HEAD_SIZE, LINE)
    columns = tl.arange(0, triton.next_power_of_2(LINES)) * LINE
    offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, TILE)
    live = (start + tl.arange(0, TILE) < end)[:, None] & (columns < HEAD_SIZE)[None, :]
    places = tl.where(live, offsets[:, None] + columns[None, :], 0)
    for head in tl.static_range(2):
        pointers = (k_head if head == 0 else v_head) + places
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def decode_qkv_kernel(
    qkv_ptr,
    qkv_stride,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
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
    EPS: tl.constexpr,
    HALF: tl.constexpr,
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
    WAIT: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """`decode_kernel` from packed q, k, v on; see there for what is not here.

    Before the wait it reads only what no kernel between the plan and this one writes: weights; the
    items, positions, slots and block tables of the step, which were complete when the plan's one
    program ended; and older keys. The plan is launched in the usual order, so every kernel behind
    it begins when all that came before the plan is visible, keys of earlier steps among it. What
    the plan itself wrote it released at the end (`plan_kernel`), and is read here past the L1.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    item = tl.program_id(0) // programs_per_item
    head_block = tl.program_id(0) % programs_per_item
    row = tl.load(items_ptr + item, cache_modifier=".cg")
    begin = tl.load(items_ptr + item_capacity + item, cache_modifier=".cg")
    end = tl.load(items_ptr + 2 * item_capacity + item, cache_modifier=".cg")
    first_item = tl.load(items_ptr + 3 * item_capacity + item, cache_modifier=".cg")
    num_chunks = tl.load(items_ptr + 4 * item_capacity + item, cache_modifier=".cg")
    first_block_id = tl.load(items_ptr + 5 * item_capacity + item, cache_modifier=".cg")
    if item >= tl.load(num_items_ptr, cache_modifier=".cg"):
        return

    dims = tl.arange(0, BLOCK_D)
    partners = rotation_partners(HALF, BLOCK_D)
    kv_head = head_block // HEAD_BLOCKS
    members = (head_block % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, PARTIAL_HEADS)
    real = members < GROUP
    num_kv_heads = programs_per_item // HEAD_BLOCKS
    qkv_row = qkv_ptr + row.to(tl.int64) * qkv_stride
    q_row = qkv_row + (kv_head * GROUP + members)[:, None] * HEAD_SIZE
    q_mask = within_head(real, HEAD_SIZE, BLOCK_D)
    k_row = qkv_row + (GROUP * num_kv_heads + kv_head) * HEAD_SIZE
    # The last item of a row holds its newest key, which is not in the cache yet.
    has_new = (item - first_item == num_chunks - 1) & (begin < end)
    old_end = tl.where(has_new, end - 1, end)

    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    # Finite: a tile may hold no older key, and inf - inf is no number.
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    q = tl.zeros([BLOCK_H, BLOCK_D], k_ptr.dtype.element_ty)
    new_score = tl.full([BLOCK_H], float("-inf"), tl.float32)
    new_v = tl.zeros([1, BLOCK_D], k_ptr.dtype.element_ty)
    first_tile = begin
    if WINDOWED:
        first_tile = begin // TILE * TILE
    if BLOCK_SIZE % TILE == 0:
        block_ids = first_block_id.to(tl.int64)
    else:
        block_ids = load_block_ids(table_row, first_tile, old_end, BLOCK_SIZE, TILE)
    if WAIT == 2:
        k, v, live = load_tile(
            k_head, v_head, block_ids, first_tile, begin, old_end, stride_block, stride_token,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        block_ids = load_block_ids(table_row, first_tile + TILE, old_end, BLOCK_SIZE, TILE)
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos, sin = load_rotation(cos_sin_ptr, position, HALF, BLOCK_D)
    q_weight = cos
    q_weight_partner = cos
    if q_weight_ptr is not None:
        q_weight = load_weight(q_weight_ptr, dims, HEAD_SIZE)
        q_weight_partner = load_weight(q_weight_ptr, partners, HEAD_SIZE)
    k_weight = cos
    k_weight_partner = cos
    if k_weight_ptr is not None:
        k_weight = load_weight(k_weight_ptr, dims, HEAD_SIZE)
        k_weight_partner = load_weight(k_weight_ptr, partners, HEAD_SIZE)
    if PREFETCH > 0:
        ids = block_ids
        place = first_tile + (TILE if WAIT == 2 else 0)
        for _ in tl.static_range(PREFETCH):
            prefetch_tile(
                k_head, v_head, ids, place, old_end, stride_block, stride_token,
                HEAD_SIZE, BLOCK_SIZE, TILE,
            )  # fmt: skip
            ids = load_block_ids(table_row, place + TILE, old_end, BLOCK_SIZE, TILE)
            place += TILE
    if WAIT != 1:
        if DEPENDENT:
            gdc_wait()
        q, new_score, new_v = prepare_row(
            q_row, k_row, num_kv_heads * HEAD_SIZE, dims, partners, q_mask, has_new,
            q_weight, q_weight_partner, k_weight, k_weight_partner, cos, sin,
            slot, head_block, k_head, v_head, stride_block, stride_token, log2_scale,
            EPS, q_weight_ptr is not None, k_weight_ptr is not None,
            HEAD_BLOCKS, BLOCK_H, HEAD_SIZE, BLOCK_SIZE, SOFT_CAP,
        )  # fmt: skip
    if WAIT == 2:
        peak, denominator, acc = attend_tile(
            q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
        )
        first_tile += TILE
        last_tile = old_end
    elif WAIT == 1:
        # One round at least: it holds the wait.
        last_tile = tl.maximum(old_end, first_tile + 1)
    else:
        last_tile = old_end
    for start in tl.range(first_tile, last_tile, TILE):
        k, v, live = load_tile(
            k_head, v_head, block_ids, start, begin, old_end, stride_block, stride_token,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        block_ids = load_block_ids(table_row, start + TILE, old_end, BLOCK_SIZE, TILE)
        if WAIT == 1:
            if start == first_tile:
                if DEPENDENT:
                    gdc_wait()
                q, new_score, new_v = prepare_row(
                    q_row, k_row, num_kv_heads * HEAD_SIZE, dims, partners, q_mask, has_new,
                    q_weight, q_weight_partner, k_weight, k_weight_partner, cos, sin,
                    slot, head_block, k_head, v_head, stride_block, stride_token, log2_scale,
                    EPS, q_weight_ptr is not None, k_weight_ptr is not None,
                    HEAD_BLOCKS, BLOCK_H, HEAD_SIZE, BLOCK_SIZE, SOFT_CAP,
                )  # fmt: skip
        peak, denominator, acc = attend_tile(
            q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
        )
    new_peak = tl.maximum(peak, new_score)
    rescale = tl.exp2(peak - new_peak)
    weight = tl.exp2(new_score - new_peak)
    denominator = denominator * rescale + weight
    acc = acc * rescale[:, None] + weight[:, None] * new_v.to(tl.float32)
    store_result(
        acc, new_peak, denominator, out_ptr + row.to(tl.int64) * out_stride_row,
        partial_ptr, lse_ptr, tickets_ptr, item, row, first_item, num_chunks, head_block,
        out_stride_head, programs_per_item,
        HEAD_BLOCKS, GROUP, BLOCK_H, PARTIAL_HEADS, MERGE, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip


@triton.jit
def prepare_row(
    q_row, k_row, v_offset, dims, partners, q_mask, has_new,
    q_weight, q_weight_partner, k_weight, k_weight_partner, cos, sin,
    slot, head_block, k_head, v_head, stride_block, stride_token, log2_scale,
    EPS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The prepared q, the score of the newest key, and its value; the two are stored by one."""
    dtype: tl.constexpr = k_head.dtype.element_ty
    new_mask = (has_new & (dims < HEAD_SIZE))[None, :]
    x = tl.load(q_row + dims[None, :], mask=q_mask, other=0.0).to(tl.float32)
    partner = tl.load(q_row + partners[None, :], mask=q_mask, other=0.0).to(tl.float32)
    k = tl.load(k_row + dims[None, :], mask=new_mask, other=0.0).to(tl.float32)
    k_partner = tl.load(k_row + partners[None, :], mask=new_mask, other=0.0).to(tl.float32)
    v = tl.load(k_row + v_offset + dims[None, :], mask=new_mask, other=0.0).to(dtype)
    q = norm_and_rotate(x, partner, q_weight, q_weight_partner, cos, sin, EPS, Q_NORM, HEAD_SIZE)
    q = q.to(dtype)
    k = norm_and_rotate(k, k_partner, k_weight, k_weight_partner, cos, sin, EPS, K_NORM, HEAD_SIZE)
    k = k.to(dtype)
    # Query heads of one KV head may be several programs': the first of them stores.
    stored = new_mask & (slot >= 0) & (head_block % HEAD_BLOCKS == 0)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token + dims[None, :]
    tl.store(k_head + place, k, mask=stored)
    tl.store(v_head + place, v, mask=stored)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * log2_scale
    if SOFT_CAP > 0.0:
        score = tanh(score / (SOFT_CAP * LOG2_E)) * (SOFT_CAP * LOG2_E)
    score = tl.where(has_new, score, float("-inf"))
    # The rows of a dot beyond the real heads hold these again.
    ROWS: tl.constexpr = q.shape[0]
    REPEATS: tl.constexpr = BLOCK_H // ROWS
    BLOCK_D: tl.constexpr = q.shape[1]
    q = tl.broadcast_to(q[None, :, :], [REPEATS, ROWS, BLOCK_D]).reshape([BLOCK_H, BLOCK_D])
    score = tl.broadcast_to(score[None, :], [REPEATS, ROWS]).reshape([BLOCK_H])
    return q, score, v
