"""The causal prefill kernel of Hopper GPUs, with a role for each group of warps, in Gluon.

FlashAttention-3's schedule (Shah et al. 2024): one warp loads tiles by the copy engine, and each
group of four warps attends 64 rows; while the tensor cores multiply a tile's weights with its
values and the next tile's keys with the queries, the group computes weights. The groups wait for
tiles and not for each other, so that one's products run beside another's exponentials.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)
"""Rows of a group of warps: those of one instruction."""


@gluon.jit
def find_row_block(
    row_block, query_start_ptr, num_seqs, GROUP: gl.constexpr, BLOCK_M: gl.constexpr
):
    """As `prefill_kernels.find_row_block`."""
    base = gl.load(query_start_ptr)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = (gl.load(query_start_ptr + middle) - base) * GROUP // BLOCK_M + middle
        low = gl.where(start <= row_block, middle, low)
        high = gl.where(start <= row_block, high, middle)
    start = (gl.load(query_start_ptr + low) - base) * GROUP // BLOCK_M + low
    return low, (row_block - start) * BLOCK_M


@gluon.jit
def find_work(
    turn, seqs, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The program's item of work of this turn, and its number of tiles, 0 if there is none.

    Items are a KV head of a row block, the last row blocks first. Every second turn deals them to
    the programs in the opposite order, so that each gets about the same number of tiles.
    """
    seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads = seqs
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    kv_head = item % num_kv_heads
    row_block = gl.maximum(num_row_blocks - 1 - item // num_kv_heads, 0)
    seq, first_row = find_row_block(row_block, query_start_ptr, num_seqs, GROUP, BLOCK_M)
    query_start = gl.load(query_start_ptr + seq)
    query_len = gl.load(query_start_ptr + seq + 1) - query_start
    seq_len = gl.load(seq_lens_ptr + seq)
    context = seq_len - query_len
    last_row = gl.minimum(first_row + BLOCK_M, query_len * GROUP) - 1
    num_tiles = (context + last_row // GROUP) // BLOCK_N + 1
    if (first_row >= query_len * GROUP) | (item >= num_row_blocks * num_kv_heads):
        num_tiles = 0
    return kv_head, seq, first_row, query_start, query_len, seq_len, num_tiles


@gluon.jit
def load_tiles(
    inputs, source, shared, bars,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The producer: each tile of keys and of values once it is free, through the copy engine."""
    pointers, strides, seqs, log2_scale, turns = inputs
    k_desc, v_desc, table_ptr, table_stride = source
    q_buffers, k_tiles, v_tiles = shared
    k_full, k_free, v_full, v_free, order = bars
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    count = 0
    for turn in range(turns):
        kv_head, seq, first_row, query_start, query_len, seq_len, num_tiles = find_work(
            turn, seqs, GROUP, BLOCK_M, BLOCK_N
        )
        table_row = table_ptr + seq.to(gl.int64) * table_stride
        block_id = gl.load(table_row)
        for tile in range(num_tiles):
            start = tile * BLOCK_N
            slot = count % STAGES
            phase = (count // STAGES) & 1
            place = [block_id, start % BLOCK_SIZE, kv_head, 0]
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, place, k_full.index(slot), k_tiles.index(slot)
            )
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, place, v_full.index(slot), v_tiles.index(slot)
            )
            block_id = gl.load(
                table_row + (start + BLOCK_N) // BLOCK_SIZE, mask=tile + 1 < num_tiles, other=0
            )
            count += 1


@gluon.jit
def weigh(scores, peak, denominator, log2_scale):
    """A tile's weights, the factor of what came before, and the running softmax with them."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * log2_scale)
    weights = gl.exp2(scores * log2_scale - new_peak[:, None])
    rescale = gl.exp2(peak - new_peak)
    denominator = denominator * rescale + gl.sum(weights, 1)
    return weights, rescale, new_peak, denominator


@gluon.jit
def attend_rows(
    inputs, shared, bars,
    MEMBER: gl.constexpr, MEMBERS: gl.constexpr, PING_PONG: gl.constexpr, GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A consumer: rows ROWS * MEMBER and after of each item, over all its tiles."""
    pointers, strides, seqs, log2_scale, turns = inputs
    q_ptr, out_ptr = pointers
    q_stride_token, q_stride_head, out_stride_token, out_stride_head = strides
    q_buffers, k_tiles, v_tiles = shared
    Q_STEP: gl.constexpr = q_buffers.type.shape[0] // 2
    k_full, k_free, v_full, v_free, order = bars
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    BLOCK_M: gl.constexpr = ROWS * MEMBERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0]
    )
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    dims = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, WIDE))
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    count = 0
    steps = 1  # so that the first is number 0 where `tile` is 1: minus 1, modulo 2
    kv_head, seq, first_row, query_start, query_len, seq_len, num_tiles = find_work(
        0, seqs, GROUP, BLOCK_M, BLOCK_N
    )
    copy_queries(
        q_buffers.index(MEMBER), q_ptr, q_stride_token, q_stride_head, query_start, query_len,
        kv_head, first_row + ROWS * MEMBER, GROUP, WIDE,
    )
    for turn in range(turns):
        q_buffer = q_buffers.index(turn % 2 * Q_STEP + MEMBER)
        next_kv_head, next_seq, next_first_row, next_query_start, next_query_len, next_seq_len, next_num_tiles = find_work(
            turn + 1, seqs, GROUP, BLOCK_M, BLOCK_N
        )
        async_copy.wait_group(0)
        fence_async_shared()
        copy_queries(
            q_buffers.index((turn + 1) % 2 * Q_STEP + MEMBER), q_ptr, q_stride_token, q_stride_head, next_query_start, next_query_len,
            next_kv_head, next_first_row + ROWS * MEMBER, GROUP, WIDE,
        )
        if num_tiles > 0:
            first_row += ROWS * MEMBER
            context = seq_len - query_len
            seen_by_all = (context + first_row // GROUP + 1) // BLOCK_N
            positions = context + (first_row + gl.arange(0, ROWS, ROW)) // GROUP

            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            k = k_tiles.index(slot).reshape([BLOCK_N, HEAD_SIZE]).permute((1, 0))
            scores = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(slot), count=1)
            scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
            peak = gl.max(scores, 1) * log2_scale
            weights = gl.exp2(scores * log2_scale - peak[:, None])
            denominator = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
            next_count = count + 1
            mbarrier.wait(
                k_full.index(next_count % STAGES), (next_count // STAGES) & 1,
                pred=1 < num_tiles,
            )
            acc = gl.zeros([ROWS, HEAD_SIZE], gl.float32, O_LAYOUT)
            for tile in range(1, num_tiles):
                v_slot = slot
                v_phase = phase
                slot = (count + tile) % STAGES
                phase = ((count + tile) // STAGES) & 1
                if PING_PONG:
                    mbarrier.wait(order.index(MEMBER), ((steps + tile) & 1) ^ (MEMBER == 0))
                k = k_tiles.index(slot).reshape([BLOCK_N, HEAD_SIZE]).permute((1, 0))
                scores = warpgroup_mma(q_buffer, k, no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                v = v_tiles.index(v_slot).reshape([BLOCK_N, HEAD_SIZE])
                acc = warpgroup_mma(p, v, acc, is_async=True)
                if PING_PONG:
                    mbarrier.arrive(order.index((MEMBER + 1) % MEMBERS), count=1)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_free.index(slot), count=1)
                if tile >= seen_by_all:
                    visible = tile * BLOCK_N + keys[None, :] <= positions[:, None]
                    scores = gl.where(visible, scores, float("-inf"))
                weights, rescale, peak, denominator = weigh(scores, peak, denominator, log2_scale)
                next_count = count + tile + 1
                mbarrier.wait(
                    k_full.index(next_count % STAGES), (next_count // STAGES) & 1,
                    pred=tile + 1 < num_tiles,
                )
                acc, p, weights = warpgroup_mma_wait(0, deps=[acc, p, weights])
                mbarrier.arrive(v_free.index(v_slot), count=1)
                acc = acc * gl.convert_layout(rescale, O_ROW)[:, None]
                p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
            mbarrier.wait(v_full.index(slot), phase)
            v = v_tiles.index(slot).reshape([BLOCK_N, HEAD_SIZE])
            if num_tiles * BLOCK_N > seq_len:
                clear_values(v, seq_len - (num_tiles - 1) * BLOCK_N)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_free.index(slot), count=1)
            count += num_tiles
            steps += num_tiles - 1

            acc = acc / gl.convert_layout(denominator, O_ROW)[:, None]
            q_buffer.store(acc.to(dtype))
            out = q_buffer.load(WIDE)
            rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            tokens = (query_start + rows // GROUP).to(gl.int64)
            heads = kv_head * GROUP + rows % GROUP
            real = rows < query_len * GROUP
            out_offsets = tokens * out_stride_token + heads * out_stride_head
            gl.store(
                out_ptr + out_offsets[:, None] + dims[None, :], out, mask=real[:, None]
            )

        kv_head = next_kv_head
        seq = next_seq
        first_row = next_first_row
        query_start = next_query_start
        query_len = next_query_len
        seq_len = next_seq_len
        num_tiles = next_num_tiles
    async_copy.wait_group(0)


@gluon.jit
def copy_queries(
    q_buffer, q_ptr, q_stride_token, q_stride_head, query_start, query_len, kv_head, first_row,
    GROUP: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Begin to copy rows of a KV head from `first_row` on; zeros beyond the sequence's."""
    dims = gl.arange(0, q_buffer.shape[1], gl.SliceLayout(0, WIDE))
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    tokens = (query_start + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    real = rows < query_len * GROUP
    q_offsets = tokens * q_stride_token + heads * q_stride_head
    async_copy.async_copy_global_to_shared(
        q_buffer, q_ptr + q_offsets[:, None] + dims[None, :], mask=real[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def clear_values(v, length):
    """Zero the tile's rows from `length` on: what lies there is no number, for all we know.

    Each consumer does it, and all write the same.
    """
    PART: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // v.shape[1], v.shape[1] // 8], [4, 1], [1, 0]
    )
    rows = gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(v.shape[0] // PART):
        if (part + 1) * PART > length:
            some = v.slice(part * PART, PART)
            values = some.load(LAYOUT)
            real = part * PART + rows < length
            some.store(gl.where(real[:, None], values, 0.0))
    fence_async_shared()


@gluon.jit(do_not_specialize=["num_seqs", "num_row_blocks", "turns"])
def hopper_prefill_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_seqs,
    num_row_blocks,
    num_kv_heads,
    turns,
    log2_scale,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    MEMBERS: gl.constexpr,
):
    """Attend the row blocks of all KV heads; see `prefill_kernels.prefill_kernel` for the rest."""
    BLOCK_M: gl.constexpr = ROWS * MEMBERS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_SIZE], dtype)
    Q_SLOTS: gl.constexpr = 4 if MEMBERS == 2 else 8
    q_buffers = gl.allocate_shared_memory(dtype, [Q_SLOTS, ROWS, HEAD_SIZE], Q_LAYOUT)
    tile_shape: gl.constexpr = [STAGES, 1, BLOCK_N, 1, HEAD_SIZE]
    k_tiles = gl.allocate_shared_memory(dtype, tile_shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, tile_shape, v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [MEMBERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=MEMBERS)
        mbarrier.init(v_free.index(slot), count=MEMBERS)
    for member in gl.static_range(MEMBERS):
        mbarrier.init(order.index(member), count=1)
    fence_async_shared()
    bars = (k_full, k_free, v_full, v_free, order)
    seqs = (seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads)
    pointers = (q_ptr, out_ptr)
    strides = (q_stride_token, q_stride_head, out_stride_token, out_stride_head)
    inputs = (pointers, strides, seqs, log2_scale, turns)
    shared = (q_buffers, k_tiles, v_tiles)
    source = (k_desc, v_desc, table_ptr, table_stride)
    if MEMBERS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (inputs, shared, bars, 0, 2, PING_PONG, GROUP, HEAD_SIZE, BLOCK_N)),
                (attend_rows, (inputs, shared, bars, 1, 2, PING_PONG, GROUP, HEAD_SIZE, BLOCK_N)),
                (load_tiles, (inputs, source, shared, bars, GROUP, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend_rows, (inputs, shared, bars, 0, 3, PING_PONG, GROUP, HEAD_SIZE, BLOCK_N)),
                (attend_rows, (inputs, shared, bars, 1, 3, PING_PONG, GROUP, HEAD_SIZE, BLOCK_N)),
                (attend_rows, (inputs, shared, bars, 2, 3, PING_PONG, GROUP, HEAD_SIZE, BLOCK_N)),
                (load_tiles, (inputs, source, shared, bars, GROUP, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
