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
    attend_tile,
    block_offsets,
    load_block_ids,
    store_result,
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
def prepared_heads(
    head_ptrs, real, weight_ptr, rotation_ptr, EPS: tl.constexpr, HALF: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads [heads, BLOCK_D] in fp32 as `KernelSet.prepare_qkv` makes them, not rounded yet.

    `head_ptrs` [heads]; those that are not `real` are zeros. Each column is loaded with its partner
    in the rotation beside it, so that no element moves between lanes.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    partners = rotation_partners(HALF, BLOCK_D)[None, :]
    mask = within_head(real, HEAD_SIZE, BLOCK_D)
    x = tl.load(head_ptrs[:, None] + dims, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(head_ptrs[:, None] + partners, mask=mask, other=0.0).to(tl.float32)
    turns = dims < 2 * HALF
    angles = tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(rotation_ptr + angles, mask=turns, other=1.0)
    sin = tl.load(rotation_ptr + HALF + angles, mask=turns, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + dims, mask=dims < HEAD_SIZE, other=0.0)
        partner_weight = tl.load(weight_ptr + partners, mask=dims < HEAD_SIZE, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + EPS)[:, None]
        x = x * (scale * weight.to(tl.float32))
        partner = partner * (scale * partner_weight.to(tl.float32))
    return x * cos + partner * tl.where(dims < HALF, -sin, sin)


@triton.jit
def load_tile(
    k_head, v_head, block_ids, start, begin, end, newest, stride_block, stride_token,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """K and V of TILE tokens from `start`, and which of them are in [begin, end).

    Zeros for the others, and for token `newest`.
    """
    tokens = start + tl.arange(0, TILE)
    live = tokens < end
    if WINDOWED:
        live = live & (tokens >= begin)
    cached = within_head(live & (tokens != newest), HEAD_SIZE, BLOCK_D)
    offsets = block_offsets(block_ids, start, stride_block, stride_token, BLOCK_SIZE, TILE)
    kv_offsets = offsets[:, None] + tl.arange(0, BLOCK_D)[None, :]
    k = tl.load(k_head + kv_offsets, mask=cached, other=0.0)
    v = tl.load(v_head + kv_offsets, mask=cached, other=0.0)
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
    last_block_id = tl.load(items_ptr + 6 * item_capacity + item, cache_modifier=".cg")
    if item >= tl.load(num_items_ptr, cache_modifier=".cg"):
        return

    # The last item of a row holds its newest key, which is not in the cache yet.
    newest = tl.where((item - first_item == num_chunks - 1) & (begin < end), end - 1, -1)
    first_tile = begin
    if WINDOWED:
        first_tile = begin // TILE * TILE
    last_tile = tl.maximum(end - 1, 0) // TILE * TILE
    kv_head = head_block // HEAD_BLOCKS
    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    if BLOCK_SIZE % TILE == 0:
        block_ids = last_block_id.to(tl.int64)
    else:
        block_ids = load_block_ids(table_row, last_tile, end, BLOCK_SIZE, TILE)
    k, v, live = load_tile(
        k_head, v_head, block_ids, last_tile, begin, end, newest, stride_block, stride_token,
        HEAD_SIZE, BLOCK_D, BLOCK_SIZE, TILE, WINDOWED,
    )  # fmt: skip
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    block_ids = load_block_ids(table_row, first_tile, last_tile, BLOCK_SIZE, TILE)
    if DEPENDENT:
        ahead = block_ids
        for index in tl.static_range(PREFETCH):
            place = first_tile + index * TILE
            prefetch_tile(
                k_head, v_head, ahead, place, last_tile, stride_block, stride_token,
                HEAD_SIZE, BLOCK_SIZE, TILE,
            )  # fmt: skip
            ahead = load_block_ids(table_row, place + TILE, last_tile, BLOCK_SIZE, TILE)
        gdc_wait()

    members = (head_block % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, PARTIAL_HEADS)
    num_kv_heads = programs_per_item // HEAD_BLOCKS
    qkv_row = qkv_ptr + row.to(tl.int64) * qkv_stride
    rotation = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    k_place = qkv_row + (GROUP * num_kv_heads + kv_head) * HEAD_SIZE
    is_new = (tl.zeros([1], tl.int32) + newest) >= 0
    q = prepared_heads(
        qkv_row + (kv_head * GROUP + members) * HEAD_SIZE, members < GROUP, q_weight_ptr, rotation,
        EPS, HALF, HEAD_SIZE, BLOCK_D,
    ).to(k_ptr.dtype.element_ty)  # fmt: skip
    new_k = prepared_heads(
        k_place + tl.zeros([1], tl.int32), is_new, k_weight_ptr, rotation,
        EPS, HALF, HEAD_SIZE, BLOCK_D,
    ).to(k_ptr.dtype.element_ty)  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    new_mask = within_head(is_new, HEAD_SIZE, BLOCK_D)
    new_v = tl.load(
        k_place + num_kv_heads * HEAD_SIZE + dims[None, :], mask=new_mask, other=0.0
    ).to(v_ptr.dtype.element_ty)  # fmt: skip
    # Query heads of one KV head may be several programs': the first of them stores.
    stored = new_mask & (slot >= 0) & (head_block % HEAD_BLOCKS == 0)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token + dims[None, :]
    tl.store(k_head + place, new_k, mask=stored)
    tl.store(v_head + place, new_v, mask=stored)
    is_newest = (last_tile + tl.arange(0, TILE) == newest)[:, None]
    k = tl.where(is_newest, new_k, k)
    v = tl.where(is_newest, new_v, v)

    # The heads again and again, in place of the rows of a dot that no head has.
    REPEATS: tl.constexpr = BLOCK_H // PARTIAL_HEADS
    q = tl.broadcast_to(q[None, :, :], [REPEATS, PARTIAL_HEADS, BLOCK_D])
    q = q.reshape([BLOCK_H, BLOCK_D])
    # Finite: a padded row has no key, and inf - inf is no number.
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    peak, denominator, acc = attend_tile(
        q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
    )
    for start in tl.range(first_tile, last_tile, TILE):
        k, v, live = load_tile(
            k_head, v_head, block_ids, start, begin, end, -1, stride_block, stride_token,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        block_ids = load_block_ids(table_row, start + TILE, last_tile, BLOCK_SIZE, TILE)
        peak, denominator, acc = attend_tile(
            q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
        )
    store_result(
        acc, peak, denominator, out_ptr + row.to(tl.int64) * out_stride_row,
        partial_ptr, lse_ptr, tickets_ptr, item, row, first_item, num_chunks, head_block,
        out_stride_head, programs_per_item,
        HEAD_BLOCKS, GROUP, BLOCK_H, PARTIAL_HEADS, MERGE, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip
