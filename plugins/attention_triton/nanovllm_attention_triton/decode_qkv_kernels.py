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
def load_heads(
    head_ptrs, real, weight_ptr, rotation_ptr, HALF: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All that `prepared` needs of heads [heads, BLOCK_D], whose first elements are `head_ptrs`.

    Those that are not `real` are zeros. Each column comes with its partner in the rotation, so that
    no element moves between lanes. All loads have one shape, and VECTOR columns per thread: in
    other layouts the compiler waits for each to move what it brought, before it issues the next.
    """
    VECTOR: tl.constexpr = 4  # 16 bytes of fp32
    dims = tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], [head_ptrs.shape[0], BLOCK_D])
    angles = tl.where(dims < HALF, dims, dims - HALF)
    partners = tl.where(dims < HALF, dims + HALF, angles)
    partners = tl.where(dims < 2 * HALF, partners, dims)
    if HALF % VECTOR == 0:
        dims = tl.max_contiguous(tl.multiple_of(dims, [1, VECTOR]), [1, VECTOR])
        angles = tl.max_contiguous(tl.multiple_of(angles, [1, VECTOR]), [1, VECTOR])
        partners = tl.max_contiguous(tl.multiple_of(partners, [1, VECTOR]), [1, VECTOR])
    mask = real[:, None] & (dims < HEAD_SIZE)
    x = tl.load(head_ptrs[:, None] + dims, mask=mask, other=0.0)
    partner = tl.load(head_ptrs[:, None] + partners, mask=mask, other=0.0)
    cos = tl.load(rotation_ptr + angles, mask=dims < 2 * HALF, other=1.0)
    sin = tl.load(rotation_ptr + HALF + angles, mask=dims < 2 * HALF, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    weight = cos
    partner_weight = cos
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + dims, mask=dims < HEAD_SIZE, other=0.0)
        partner_weight = tl.load(weight_ptr + partners, mask=dims < HEAD_SIZE, other=0.0)
    return x, partner, weight, partner_weight, cos, sin


@triton.jit
def prepared(
    x, partner, weight, partner_weight, cos, sin,
    NORM: tl.constexpr, EPS: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Loaded heads as `KernelSet.prepare_qkv` makes them: fp32 until one rounding at the end."""
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    partner = partner.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + EPS)[:, None]
        x = x * (scale * weight.to(tl.float32))
        partner = partner * (scale * partner_weight.to(tl.float32))
    return (x * cos + partner * sin).to(dtype)


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
def prepare_row(
    q_ptrs, real, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, rotation_ptr, is_new, log2_scale,
    EPS: tl.constexpr, HALF: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The program's queries [heads, BLOCK_D]; and where the newest key is its item's: key and value
    [heads, BLOCK_D], as many times as there are heads, and the scores [heads], else -inf.
    """
    dims = tl.arange(0, BLOCK_D)
    same = tl.zeros_like(real).to(tl.int32)
    new = same + is_new.to(tl.int32) > 0
    # Every load before the first use.
    new_v = tl.load(
        (v_ptr + same)[:, None] + dims[None, :],
        mask=within_head(new, HEAD_SIZE, BLOCK_D),
        other=0.0,
    )
    x, xp, xw, xpw, xc, xs = load_heads(
        q_ptrs, real, q_weight_ptr, rotation_ptr, HALF, HEAD_SIZE, BLOCK_D
    )
    y, yp, yw, ypw, yc, ys = load_heads(
        k_ptr + same, new, k_weight_ptr, rotation_ptr, HALF, HEAD_SIZE, BLOCK_D
    )
    q = prepared(x, xp, xw, xpw, xc, xs, q_weight_ptr is not None, EPS, HEAD_SIZE)
    new_k = prepared(y, yp, yw, ypw, yc, ys, k_weight_ptr is not None, EPS, HEAD_SIZE)
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * log2_scale
    if SOFT_CAP > 0.0:
        score = tanh(score / (SOFT_CAP * LOG2_E), q.dtype) * (SOFT_CAP * LOG2_E)
    return q, new_k, new_v, tl.where(new, score, float("-inf"))


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """[heads, columns] -> [ROWS, columns]: the heads again and again."""
    HEADS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[None, :, :], [ROWS // HEADS, HEADS, COLUMNS]).reshape([ROWS, COLUMNS])


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
):
    """`decode_kernel` from packed q, k, v on; see there for what is not here.

    Before the wait it reads only what no kernel between the plan and this one writes: weights; the
    items, positions, slots and block tables of the step, which were complete when the plan's one
    program ended; and older keys. The plan waits and gives no signal, so every kernel behind it
    begins when all that came before the plan is visible, keys of earlier steps among it. What
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

    # The last item of a row holds its newest key, which is not in the cache yet.
    is_new = (item - first_item == num_chunks - 1) & (begin < end)
    old_end = tl.where(is_new, end - 1, end)
    first_tile = begin
    if WINDOWED:
        first_tile = begin // TILE * TILE
    kv_head = head_block // HEAD_BLOCKS
    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    if BLOCK_SIZE % TILE == 0:
        block_ids = first_block_id.to(tl.int64)
    else:
        block_ids = load_block_ids(table_row, first_tile, old_end, BLOCK_SIZE, TILE)
    members = (head_block % HEAD_BLOCKS) * PARTIAL_HEADS + tl.arange(0, PARTIAL_HEADS)
    num_kv_heads = programs_per_item // HEAD_BLOCKS
    qkv_row = qkv_ptr + row.to(tl.int64) * qkv_stride
    q_ptrs = qkv_row + (kv_head * GROUP + members) * HEAD_SIZE
    new_k_ptr = qkv_row + (GROUP * num_kv_heads + kv_head) * HEAD_SIZE
    new_v_ptr = new_k_ptr + num_kv_heads * HEAD_SIZE
    slot = tl.load(slots_ptr + row).to(tl.int64)
    rotation = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * (2 * HALF)

    # Finite: a tile may hold no older key, and inf - inf is no number.
    peak = tl.full([BLOCK_H], LOWEST, tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    q = tl.zeros([BLOCK_H, BLOCK_D], k_ptr.dtype.element_ty)
    new_k = tl.zeros([PARTIAL_HEADS, BLOCK_D], k_ptr.dtype.element_ty)
    new_v = new_k
    new_score = tl.zeros([PARTIAL_HEADS], tl.float32)
    # The first round holds the wait: then the compiler's pipeline has the keys of the first rounds
    # in flight before it. So there is one round at least.
    for start in tl.range(first_tile, tl.maximum(old_end, first_tile + 1), TILE):
        k, v, live = load_tile(
            k_head, v_head, block_ids, start, begin, old_end, stride_block, stride_token,
            HEAD_SIZE, BLOCK_D, BLOCK_SIZE, TILE, WINDOWED,
        )  # fmt: skip
        block_ids = load_block_ids(table_row, start + TILE, old_end, BLOCK_SIZE, TILE)
        if start == first_tile:
            if DEPENDENT:
                gdc_wait()
            heads, new_k, new_v, new_score = prepare_row(
                q_ptrs, members < GROUP, new_k_ptr, new_v_ptr, q_weight_ptr, k_weight_ptr,
                rotation, is_new, log2_scale, EPS, HALF, HEAD_SIZE, BLOCK_D, SOFT_CAP,
            )  # fmt: skip
            q = repeated(heads, BLOCK_H)
        peak, denominator, acc = attend_tile(
            q, k, v, live, log2_scale, peak, denominator, acc, SOFT_CAP
        )

    # Query heads of one KV head may be several programs': the first of them stores.
    dims = tl.arange(0, BLOCK_D)
    first_head = tl.arange(0, PARTIAL_HEADS) == 0
    stored = is_new & (slot >= 0) & (head_block % HEAD_BLOCKS == 0)
    stored = within_head(first_head & stored, HEAD_SIZE, BLOCK_D)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    places = place + tl.zeros_like(members)[:, None] + dims[None, :]
    tl.store(k_head + places, new_k, mask=stored)
    tl.store(v_head + places, new_v, mask=stored)

    score = repeated(new_score[:, None], BLOCK_H).reshape([BLOCK_H])
    new_peak = tl.maximum(peak, score)
    rescale = tl.exp2(peak - new_peak)
    weight = tl.exp2(score - new_peak)
    denominator = denominator * rescale + weight
    new_values = repeated(new_v, BLOCK_H).to(tl.float32)
    acc = acc * rescale[:, None] + weight[:, None] * new_values
    store_result(
        acc, new_peak, denominator, out_ptr + row.to(tl.int64) * out_stride_row,
        partial_ptr, lse_ptr, tickets_ptr, item, row, first_item, num_chunks, head_block,
        out_stride_head, programs_per_item,
        HEAD_BLOCKS, GROUP, BLOCK_H, PARTIAL_HEADS, MERGE, HEAD_SIZE, BLOCK_D,
    )  # fmt: skip
