"""The causal prefill kernel for Hopper GPUs, in Gluon: each group of warps has a role of its own.

The schedule is FlashAttention-3's (Shah et al. 2024). One warp loads tiles of keys and values by
the copy engine. Each consumer, a group of four warps, attends 64 rows of the block: while the
tensor cores multiply the next tile's keys and this tile's values, it computes the next tile's
weights. Consumers wait for tiles and not for each other, so the exponentials of one run beside the
products of the other. Programs are persistent: the first tiles of the next block of rows and its
queries are loaded while the last ones of this block are attended.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.
# ruff: noqa: RUF059 - a tuple stands for a structure, of which each role takes what it needs

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

from nanovllm_attention_triton.hopper_rows import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    clear_values,
    copy_queries,
    store_rows,
    wait_for_keys,
    weigh,
)
from nanovllm_attention_triton.hopper_work import (
    CONSUMERS,
    ROWS,
    draw_ticket,
    make_barriers,
    make_queue,
    next_work,
    publish,
    receive,
)


@gluon.jit(do_not_specialize=["num_seqs", "num_row_blocks", "num_kv_heads", "table_stride"])
def hopper_prefill_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    ticket_ptr,
    num_seqs,
    num_row_blocks,
    num_kv_heads,
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
    IN_ORDER: gl.constexpr,
):
    """Attend all row blocks of all KV heads; a program takes what it draws (`hopper_work`).

    Rows, row blocks and `log2_scale` are those of `prefill_kernels.prefill_kernel`, with the causal
    mask and no other. A cache block holds whole tiles. A query that sees no key gets 0. Nothing
    beyond a sequence's length reaches its result; a last, partial tile is loaded whole, and what
    lies beyond the length is masked in the scores and cleared in the values. IN_ORDER: the
    consumers issue their products in turn.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_SIZE], dtype)
    q_rows = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, ROWS, HEAD_SIZE], q_layout)
    tiles: gl.constexpr = [STAGES, 1, BLOCK_N, 1, HEAD_SIZE]
    k_tiles = gl.allocate_shared_memory(dtype, tiles, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, tiles, v_desc.layout)
    k_full, v_full, k_free, v_free, order = make_barriers(STAGES)
    queue = make_queue()
    fence_async_shared()
    seqs = (seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads, True)
    inputs = (
        q_ptr, out_ptr, log2_scale,
        q_stride_token, q_stride_head, out_stride_token, out_stride_head,
    )  # fmt: skip
    caches = (k_desc, v_desc, table_ptr, table_stride, seqs, ticket_ptr)
    shared = (q_rows, k_tiles, v_tiles, k_full, v_full, k_free, v_free, order)
    gl.warp_specialize(
        [
            (attend_rows, (inputs, shared, queue, 0, IN_ORDER, GROUP, HEAD_SIZE, BLOCK_N)),
            (attend_rows, (inputs, shared, queue, 1, IN_ORDER, GROUP, HEAD_SIZE, BLOCK_N)),
            (load_tiles, (caches, shared, queue, GROUP, BLOCK_SIZE, BLOCK_N)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def load_tiles(
    caches, shared, queue, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The producer: draw work, and load each tile's keys and values once their places are free.

    The item after the next is drawn and looked up while the first tiles of this one are on their
    way, so that consumers find the next one there. They wait for it behind this one's first tile,
    so it may not wait for more tiles than there are places.
    """
    k_desc, v_desc, table_ptr, table_stride, seqs, ticket_ptr = caches
    turn = 0
    count = 0
    work = next_work(gl.program_id(0), seqs, ticket_ptr, GROUP, BLOCK_N)
    publish(queue, 0, work)
    following = work
    while work[5] > 0:
        kv_head, first_row, query_start, query_len, seq_len, num_tiles, seq = work
        table_row = table_ptr + seq.to(gl.int64) * table_stride
        block_id = gl.load(table_row)
        for tile in range(gl.minimum(num_tiles, 2)):
            block_id = load_tile(
                k_desc, v_desc, shared, count + tile, block_id, kv_head, tile, num_tiles,
                table_row, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        if turn == 0:
            item = draw_ticket(seqs, ticket_ptr)
            following = next_work(item, seqs, ticket_ptr, GROUP, BLOCK_N)
            publish(queue, 1, following)
        last = following
        if following[5] > 0:
            item = draw_ticket(seqs, ticket_ptr)
            last = next_work(item, seqs, ticket_ptr, GROUP, BLOCK_N)
            publish(queue, turn + 2, last)
        for tile in range(2, num_tiles):
            block_id = load_tile(
                k_desc, v_desc, shared, count + tile, block_id, kv_head, tile, num_tiles,
                table_row, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        count += num_tiles
        turn += 1
        work = following
        following = last


@gluon.jit
def load_tile(
    k_desc, v_desc, shared, count, block_id, kv_head, tile, num_tiles, table_row,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Load the tile, of this block, as number `count` of all; returns the block of the next one."""
    q_rows, k_tiles, v_tiles, k_full, v_full, k_free, v_free, order = shared
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    start = tile * BLOCK_N
    slot = count % STAGES
    phase = count // STAGES & 1
    place = [block_id, start % BLOCK_SIZE, kv_head, 0]
    mbarrier.wait(k_free.index(slot), phase ^ 1)
    mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, place, k_full.index(slot), k_tiles.index(slot))
    mbarrier.wait(v_free.index(slot), phase ^ 1)
    mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, place, v_full.index(slot), v_tiles.index(slot))
    return gl.load(table_row + (start + BLOCK_N) // BLOCK_SIZE, mask=tile + 1 < num_tiles, other=0)


@gluon.jit
def attend_rows(
    inputs, shared, queue, CONSUMER: gl.constexpr, IN_ORDER: gl.constexpr, GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A consumer: its ROWS rows of each block of rows, over all tiles of the block.

    A round issues the products of the next tile's keys and of this tile's values, and computes the
    next tile's weights beside the second. The wait for the next tile's keys is the last thing
    before the wait for the values' product: a branch there keeps ptxas from moving that wait
    before the weights.
    """
    q_ptr, out_ptr, log2_scale = inputs[:3]
    q_stride_token, q_stride_head, out_stride_token, out_stride_head = inputs[3:]
    q_rows, k_tiles, v_tiles, k_full, v_full, k_free, v_free, order = shared
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    count = 0
    rounds = 0
    turn = 0
    work = receive(queue, 0)
    q = q_rows.index(CONSUMER)
    copy_queries(q, q_ptr, q_stride_token, q_stride_head, work, CONSUMER, GROUP)
    while work[5] > 0:
        async_copy.wait_group(0)
        fence_async_shared()
        q = q_rows.index(turn % 2 * CONSUMERS + CONSUMER)
        next_q = q_rows.index((turn + 1) % 2 * CONSUMERS + CONSUMER)
        kv_head, first_row, query_start, query_len, seq_len, num_tiles = work
        first_row += ROWS * CONSUMER
        context = seq_len - query_len
        positions = context + (first_row + gl.arange(0, ROWS, ROW)) // GROUP
        seen_by_all = (context + first_row // GROUP + 1) // BLOCK_N
        peak = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        denominator = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, HEAD_SIZE], gl.float32, O_LAYOUT)

        slot = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_tiles.index(slot).reshape([BLOCK_N, HEAD_SIZE]).permute((1, 0))
        scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        weights, rescale, peak, denominator = weigh(scores, peak, denominator, log2_scale)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        following = receive(queue, turn + 1)
        copy_queries(next_q, q_ptr, q_stride_token, q_stride_head, following, CONSUMER, GROUP)
        wait_for_keys(k_full, count + 1, num_tiles > 1)
        for tile in range(1, num_tiles):
            v_slot = slot
            v_phase = phase
            slot = (count + tile) % STAGES
            phase = (count + tile) // STAGES & 1
            if IN_ORDER:
                mbarrier.wait(order.index(CONSUMER), rounds & 1 ^ (CONSUMER == 0))
            k = k_tiles.index(slot).reshape([BLOCK_N, HEAD_SIZE]).permute((1, 0))
            scores = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            v = v_tiles.index(v_slot).reshape([BLOCK_N, HEAD_SIZE])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            if IN_ORDER:
                mbarrier.arrive(order.index((CONSUMER + 1) % CONSUMERS), count=1)
                rounds += 1
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_free.index(slot), count=1)
            if tile >= seen_by_all:
                visible = tile * BLOCK_N + keys[None, :] <= positions[:, None]
                scores = gl.where(visible, scores, float("-inf"))
            weights, rescale, peak, denominator = weigh(scores, peak, denominator, log2_scale)
            wait_for_keys(k_full, count + tile + 1, tile + 1 < num_tiles)
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

        mass = gl.where(denominator > 0.0, denominator, 1.0)
        acc = acc / gl.convert_layout(mass, O_ROW)[:, None]
        store_rows(acc, q, out_ptr, out_stride_token, out_stride_head, work, CONSUMER, GROUP)
        work = following
        turn += 1
    async_copy.wait_group(0)
