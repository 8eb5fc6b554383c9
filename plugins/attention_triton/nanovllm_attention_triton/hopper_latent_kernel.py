"""Decode over latent rows for Hopper GPUs, in Gluon: one warp loads rows, four multiply them.

What `latent_kernels.latent_decode_kernel` computes. That kernel cannot load a tile of 64 rows, the
fewest that Hopper's tensor cores take from shared memory, while it multiplies another one: Triton
keeps room for three, and two fill a multiprocessor. Here the copy engine fills one place while the
other one is multiplied. Programs are persistent: the first tiles of the next item are loaded while
the last ones of this item are attended.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.
# ruff: noqa: RUF059 - a tuple stands for a structure, of which each role takes what it needs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PRODUCER_REGISTERS = gl.constexpr(64)
STAGES = gl.constexpr(2)
"""Places for tiles in shared memory."""


@gluon.jit
def hopper_latent_kernel(
    q_ptr,
    value_desc,
    rest_desc,
    out_ptr,
    table_ptr,
    items_ptr,
    part_starts_ptr,
    partial_ptr,
    lse_ptr,
    log2_scale,
    q_stride_row,
    q_stride_head,
    out_stride_row,
    out_stride_head,
    table_stride,
    item_capacity,
    NUM_HEADS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    PARTIAL_HEADS: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    BLOCK_V: gl.constexpr,
    REST_SIZE: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Attend the items of one part of an even plan with a block of heads; see `even_plan`.

    Other arguments and results are those of `latent_decode_kernel`. The descriptors load tiles
    [1, TILE, 1, BLOCK_V] and [1, TILE, 1, BLOCK_R] of the cache, whose blocks hold whole tiles. A
    tile is loaded whole: what lies beyond the sequence is masked in the scores and cleared in the
    values.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    value_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE, 1, BLOCK_V], value_desc.layout)
    rest_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE, 1, BLOCK_R], rest_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    # Past the L1: see `decode_qkv_kernels.decode_qkv_kernel`, which reads the plan as early.
    part_start = part_starts_ptr + gl.program_id(0) // HEAD_BLOCKS
    first_item = gl.load(part_start, cache_modifier=".cg")
    end_item = gl.load(part_start + 1, cache_modifier=".cg")
    if first_item == end_item:
        return
    plan = (items_ptr, item_capacity, first_item, end_item)
    shared = (value_tiles, rest_tiles, full, free)
    inputs = (q_ptr, q_stride_row, q_stride_head, log2_scale)
    outputs = (out_ptr, out_stride_row, out_stride_head, partial_ptr, lse_ptr)
    sizes: gl.constexpr = (NUM_HEADS, HEAD_BLOCKS, PARTIAL_HEADS, VALUE_SIZE, REST_SIZE)
    caches = (value_desc, rest_desc, table_ptr, table_stride)
    gl.warp_specialize(
        [
            (attend_items, (inputs, outputs, plan, shared, sizes, BLOCK_H, DEPENDENT)),
            (load_items, (caches, plan, shared, VALUE_SIZE, BLOCK_SIZE, DEPENDENT)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def load_items(
    caches, plan, shared, VALUE_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The producer: load the tiles of the program's items, each once its place is free.

    Only with the tile of a row's newest token does it wait for the kernel before.
    """
    value_desc, rest_desc, table_ptr, table_stride = caches
    items_ptr, capacity, first_item, end_item = plan
    value_tiles, rest_tiles, full, free = shared
    TILE: gl.constexpr = value_tiles.shape[2]
    NUM_BYTES: gl.constexpr = value_desc.block_type.nbytes + rest_desc.block_type.nbytes
    count = 0
    for number in range(first_item, end_item):
        item = items_ptr + number
        row = gl.load(item, cache_modifier=".cg").to(gl.int64)
        begin = gl.load(item + capacity, cache_modifier=".cg")
        end = gl.load(item + 2 * capacity, cache_modifier=".cg")
        row_first = gl.load(item + 3 * capacity, cache_modifier=".cg")
        num_chunks = gl.load(item + 4 * capacity, cache_modifier=".cg")
        block_id = gl.load(item + 5 * capacity, cache_modifier=".cg")
        is_newest = number - row_first == num_chunks - 1
        for start in range(begin, end, TILE):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), count // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(slot), NUM_BYTES)
            place = start % BLOCK_SIZE
            if DEPENDENT:  # noqa: SIM102 - the one is the compiler's, the other the program's
                if is_newest & (start + TILE >= end):
                    gdc_wait()
            tma.async_copy_global_to_shared(
                value_desc, [block_id, place, 0, 0], full.index(slot), value_tiles.index(slot)
            )
            tma.async_copy_global_to_shared(
                rest_desc, [block_id, place, 0, VALUE_SIZE], full.index(slot),
                rest_tiles.index(slot),
            )  # fmt: skip
            following = start + TILE
            entry = table_ptr + row * table_stride + following // BLOCK_SIZE
            block_id = gl.load(entry, mask=following < end, other=0)
            count += 1


@gluon.jit
def attend_items(
    inputs, outputs, plan, shared, sizes: gl.constexpr, BLOCK_H: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The consumer: attend the tiles of the program's items, and store what becomes of each."""
    q_ptr, q_stride_row, q_stride_head, log2_scale = inputs
    items_ptr, capacity, first_item, end_item = plan
    value_tiles, rest_tiles, full, free = shared
    NUM_HEADS: gl.constexpr = sizes[0]
    HEAD_BLOCKS: gl.constexpr = sizes[1]
    TILE: gl.constexpr = value_tiles.shape[2]
    BLOCK_V: gl.constexpr = value_tiles.shape[4]
    BLOCK_R: gl.constexpr = rest_tiles.shape[4]
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # The scores [keys, heads] and the output [values, heads] lie alike.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    q_value = gl.allocate_shared_memory(
        dtype, [BLOCK_H, BLOCK_V],
        gl.NVMMASharedLayout.get_default_for([BLOCK_H, BLOCK_V], dtype),
    )  # fmt: skip
    q_rest = gl.allocate_shared_memory(
        dtype, [BLOCK_H, BLOCK_R],
        gl.NVMMASharedLayout.get_default_for([BLOCK_H, BLOCK_R], dtype),
    )  # fmt: skip
    p = gl.allocate_shared_memory(
        dtype, [TILE, BLOCK_H], gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_H], dtype)
    )
    keys = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    no_scores = gl.zeros([TILE, BLOCK_H], gl.float32, LAYOUT)
    first_work = first_item * HEAD_BLOCKS + gl.program_id(0) % HEAD_BLOCKS
    count = 0
    for work in range(first_work, end_item * HEAD_BLOCKS, HEAD_BLOCKS):
        # A block of heads that is the same in all rounds would have the compiler keep every offset
        # of a store in a register.
        item = work // HEAD_BLOCKS
        head_block = work % HEAD_BLOCKS
        row = gl.load(items_ptr + item, cache_modifier=".cg").to(gl.int64)
        begin = gl.load(items_ptr + capacity + item, cache_modifier=".cg")
        end = gl.load(items_ptr + 2 * capacity + item, cache_modifier=".cg")
        if DEPENDENT:  # noqa: SIM102 - the one is the compiler's, the other the program's
            if work == first_work:
                gdc_wait()
                # Behind the wait, so that the merge may read the plan before its own.
                gdc_launch_dependents()
        first_head = head_block * BLOCK_H
        q_row = q_ptr + row * q_stride_row
        copy_queries(q_value, q_row, q_stride_head, first_head, NUM_HEADS, sizes[3])
        copy_queries(q_rest, q_row + sizes[3], q_stride_head, first_head, NUM_HEADS, sizes[4])
        fence_async_shared()
        peak = gl.full([BLOCK_H], float("-inf"), gl.float32, HEAD)
        mass = gl.zeros([TILE, BLOCK_H], gl.float32, LAYOUT)
        acc = gl.zeros([BLOCK_V, BLOCK_H], gl.float32, LAYOUT)
        for start in range(begin, end, TILE):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES & 1)
            value = value_tiles.index(slot).reshape([TILE, BLOCK_V])
            rest = rest_tiles.index(slot).reshape([TILE, BLOCK_R])
            scores = warpgroup_mma(
                value, q_value.permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(rest, q_rest.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            live = start + keys < end
            scores = gl.where(live[:, None], scores * log2_scale, float("-inf"))
            new_peak = gl.maximum(peak, gl.max(scores, 0))
            weights = gl.exp2(scores - new_peak[None, :])
            rescale = gl.exp2(peak - new_peak)[None, :]
            peak = new_peak
            mass = mass * rescale + weights
            p.store(weights.to(dtype))
            if end - start < TILE:
                clear_values(value, end - start)
            fence_async_shared()
            acc = acc * rescale
            acc = warpgroup_mma(value.permute((1, 0)), p, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(slot), count=1)
            count += 1
        store_item(acc, peak, gl.sum(mass, 0), outputs, plan, item, row, head_block, sizes)


@gluon.jit
def copy_queries(q, q_row, stride_head, first_head, NUM_HEADS: gl.constexpr, SIZE: gl.constexpr):
    """Copy SIZE columns of a row's queries, and zeros behind these."""
    layout: gl.constexpr = wide_layout(q.shape[1])
    columns = gl.arange(0, q.shape[1], gl.SliceLayout(0, layout))
    heads = first_head + gl.arange(0, q.shape[0], gl.SliceLayout(1, layout))
    offsets = heads[:, None] * stride_head + columns[None, :]
    real = (heads < NUM_HEADS)[:, None] & (columns < SIZE)[None, :]
    q.store(gl.load(q_row + offsets, mask=real, other=0.0))


@gluon.jit
def clear_values(value, length):
    """Zero a tile's rows from `length` on, which may hold anything, in shared memory."""
    PART: gl.constexpr = 16
    layout: gl.constexpr = wide_layout(value.shape[1])
    rows = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(value.shape[0] // PART):
        if (part + 1) * PART > length:
            values = value.slice(part * PART, PART)
            live = part * PART + rows < length
            values.store(gl.where(live[:, None], values.load(layout), 0.0))


@gluon.jit
def store_item(acc, peak, denominator, outputs, plan, item, row, head_block, sizes: gl.constexpr):
    """Store the output of an item that is its whole row, else its part and log-sum-exp."""
    out_ptr, out_stride_row, out_stride_head, partial_ptr, lse_ptr = outputs
    items_ptr, capacity, first_item, end_item = plan
    LAYOUT: gl.constexpr = acc.type.layout
    BLOCK_V: gl.constexpr = acc.shape[0]
    BLOCK_H: gl.constexpr = acc.shape[1]
    lanes = gl.arange(0, BLOCK_H, gl.SliceLayout(0, LAYOUT))
    values = gl.arange(0, BLOCK_V, gl.SliceLayout(1, LAYOUT))
    heads = head_block * BLOCK_H + lanes
    real = heads < sizes[0]
    # Only a padded row has no mass: its zeros stay zeros.
    result = acc / gl.where(denominator > 0.0, denominator, 1.0)[None, :]
    if gl.load(items_ptr + 4 * capacity + item) == 1:
        # Sums with the row in them: others are the same for all items, and would be kept in
        # registers from one to the next.
        starts = row * out_stride_row + heads * out_stride_head
        mask = (values < sizes[3])[:, None] & real[None, :]
        gl.store(
            out_ptr + starts[None, :] + values[:, None],
            result.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        slots = (item * sizes[1] + head_block).to(gl.int64) * sizes[2] + lanes
        gl.store(lse_ptr + slots, peak + gl.log2(denominator), mask=real)
        gl.store(
            partial_ptr + slots[None, :] * BLOCK_V + values[:, None], result, mask=real[None, :]
        )


@gluon.constexpr_function
def wide_layout(columns):
    """Threads that load and store rows in pieces of 8 elements."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
