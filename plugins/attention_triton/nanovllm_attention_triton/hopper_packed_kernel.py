"""Attention over packed keys and values for Hopper GPUs, in Gluon: prompts of latent attention.

The roles and the schedule are those of `hopper_prefill_kernel`. A key has FRONT columns and REST
more, as in `packed_kernels`, which are loaded and multiplied as two tiles. Tiles of 192 columns
leave room for one block of queries: those of the next block are copied behind this one's.
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

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit(
    do_not_specialize=["num_seqs", "num_row_blocks", "num_heads", "causal", "lse_stride_head"]
)
def hopper_packed_kernel(
    q_ptr,
    front_desc,
    rest_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    key_start_ptr,
    key_lens_ptr,
    ticket_ptr,
    num_seqs,
    num_row_blocks,
    num_heads,
    causal,
    log2_scale,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    FRONT: gl.constexpr,
    REST: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend all row blocks of all heads; a program takes what it draws (`hopper_work`).

    As `packed_kernels.packed_kernel`, with `key_lens` [S], the keys of each sequence. A tile may
    hold keys of the next sequence, or go on beyond all, where the copy engine reads zeros. Keys of
    others are masked in the scores, and their values cleared.
    """
    gl.static_assert(VALUE_SIZE == FRONT, "results take the room of the queries' front columns")
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, FRONT], dtype)
    q_front = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, FRONT], q_layout)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
    q_rest = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, REST], rest_layout)
    k_front = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, 1, FRONT], front_desc.layout)
    k_rest = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, 1, REST], rest_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, 1, VALUE_SIZE], v_desc.layout)
    barriers = make_barriers(STAGES)
    queue = make_queue()
    fence_async_shared()
    seqs = (key_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_heads, causal)
    inputs = (
        q_ptr, out_ptr, lse_ptr, causal, log2_scale, q_stride_token, q_stride_head,
        out_stride_token, out_stride_head, lse_stride_head,
    )  # fmt: skip
    keys = (front_desc, rest_desc, v_desc, key_start_ptr, seqs, ticket_ptr)
    tiles = (q_front, q_rest, k_front, k_rest, v_tiles)
    gl.warp_specialize(
        [
            (attend_rows, (inputs, tiles, barriers, queue, 0)),
            (attend_rows, (inputs, tiles, barriers, queue, 1)),
            (load_tiles, (keys, tiles, barriers, queue)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def load_tiles(keys, tiles, barriers, queue):
    """The producer: draw work, and load each tile's keys and values once their places are free.

    The next item is drawn while the places of this one's last tile are not free yet: no earlier,
    or the programs that draw first would take more than their share of few items.
    """
    front_desc, rest_desc, v_desc, key_start_ptr, seqs, ticket_ptr = keys
    BLOCK_N: gl.constexpr = front_desc.block_type.shape[0]
    turn = 0
    count = 0
    work = next_work(gl.program_id(0), seqs, ticket_ptr, 1, BLOCK_N)
    publish(queue, 0, work)
    while work[5] > 0:
        head, first_row, query_start, query_len, key_len, num_tiles, seq = work
        key_start = gl.load(key_start_ptr + seq)
        for tile in range(num_tiles - 1):
            load_tile(keys, tiles, barriers, count + tile, key_start + tile * BLOCK_N, head)
        item = draw_ticket(seqs, ticket_ptr)
        work = next_work(item, seqs, ticket_ptr, 1, BLOCK_N)
        publish(queue, turn + 1, work)
        last = num_tiles - 1
        load_tile(keys, tiles, barriers, count + last, key_start + last * BLOCK_N, head)
        count += num_tiles
        turn += 1


@gluon.jit
def load_tile(keys, tiles, barriers, count, first_key, head):
    """Load the tile of keys from `first_key` on, as number `count` of all."""
    front_desc, rest_desc, v_desc, key_start_ptr, seqs, ticket_ptr = keys
    q_front, q_rest, k_front, k_rest, v_tiles = tiles
    k_full, v_full, k_free, v_free, order = barriers
    STAGES: gl.constexpr = k_front.type.shape[0]
    FRONT: gl.constexpr = k_front.type.shape[3]
    slot = count % STAGES
    phase = count // STAGES & 1
    mbarrier.wait(k_free.index(slot), phase ^ 1)
    mbarrier.expect(k_full.index(slot), front_desc.block_type.nbytes + rest_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        front_desc, [first_key, head, 0], k_full.index(slot), k_front.index(slot)
    )
    tma.async_copy_global_to_shared(
        rest_desc, [first_key, head, FRONT], k_full.index(slot), k_rest.index(slot)
    )
    mbarrier.wait(v_free.index(slot), phase ^ 1)
    mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        v_desc, [first_key, head, 0], v_full.index(slot), v_tiles.index(slot)
    )


@gluon.jit
def attend_rows(inputs, tiles, barriers, queue, CONSUMER: gl.constexpr):
    """A consumer: its ROWS rows of each block; rounds as in `hopper_prefill_kernel`."""
    q_ptr, out_ptr, lse_ptr, causal, log2_scale = inputs[:5]
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head = inputs[5:]
    q_front, q_rest, k_front, k_rest, v_tiles = tiles
    k_full, v_full, k_free, v_free, order = barriers
    STAGES: gl.constexpr = k_front.type.shape[0]
    BLOCK_N: gl.constexpr = k_front.type.shape[1]
    FRONT: gl.constexpr = k_front.type.shape[3]
    VALUE_SIZE: gl.constexpr = v_tiles.type.shape[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_SIZE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    q = q_front.index(CONSUMER)
    more_q = q_rest.index(CONSUMER)
    count = 0
    rounds = 0
    turn = 0
    work = receive(queue, 0)
    while work[5] > 0:
        copy_queries(q, q_ptr, q_stride_token, q_stride_head, work, CONSUMER, 1)
        copy_queries(more_q, q_ptr + FRONT, q_stride_token, q_stride_head, work, CONSUMER, 1)
        head, first_row, query_start, query_len, key_len, num_tiles = work
        first_row += ROWS * CONSUMER
        # A row sees the keys before its bound; every row of the consumer `seen_by_all` tiles.
        rows = first_row + gl.arange(0, ROWS, ROW)
        bounds = gl.full([ROWS], key_len, gl.int32, ROW)
        seen_by_all = key_len // BLOCK_N
        if causal:
            bounds = gl.minimum(key_len - query_len + rows + 1, bounds)
            seen_by_all = gl.minimum(key_len - query_len + first_row + 1, key_len) // BLOCK_N
        peak = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        denominator = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, VALUE_SIZE], gl.float32, O_LAYOUT)
        async_copy.wait_group(0)
        fence_async_shared()

        slot = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        scores = multiply_keys(q, more_q, k_front.index(slot), k_rest.index(slot), no_scores)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(slot), count=1)
        scores = gl.where(keys[None, :] < bounds[:, None], scores, float("-inf"))
        weights, rescale, peak, denominator = weigh(scores, peak, denominator, log2_scale)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        wait_for_keys(k_full, count + 1, num_tiles > 1)
        for tile in range(1, num_tiles):
            v_slot = slot
            v_phase = phase
            slot = (count + tile) % STAGES
            phase = (count + tile) // STAGES & 1
            mbarrier.wait(order.index(CONSUMER), rounds & 1 ^ (CONSUMER == 0))
            scores = multiply_keys(q, more_q, k_front.index(slot), k_rest.index(slot), no_scores)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            v = v_tiles.index(v_slot).reshape([BLOCK_N, VALUE_SIZE])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            mbarrier.arrive(order.index((CONSUMER + 1) % CONSUMERS), count=1)
            rounds += 1
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_free.index(slot), count=1)
            if tile >= seen_by_all:
                visible = tile * BLOCK_N + keys[None, :] < bounds[:, None]
                scores = gl.where(visible, scores, float("-inf"))
            weights, rescale, peak, denominator = weigh(scores, peak, denominator, log2_scale)
            wait_for_keys(k_full, count + tile + 1, tile + 1 < num_tiles)
            acc, p, weights = warpgroup_mma_wait(0, deps=[acc, p, weights])
            mbarrier.arrive(v_free.index(v_slot), count=1)
            acc = acc * gl.convert_layout(rescale, O_ROW)[:, None]
            p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(slot), phase)
        v = v_tiles.index(slot).reshape([BLOCK_N, VALUE_SIZE])
        if num_tiles * BLOCK_N > key_len:
            clear_values(v, key_len - (num_tiles - 1) * BLOCK_N)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_free.index(slot), count=1)
        count += num_tiles

        mass = gl.where(denominator > 0.0, denominator, 1.0)
        lse_row = lse_ptr + head.to(gl.int64) * lse_stride_head + query_start
        gl.store(lse_row + rows, (peak + gl.log2(mass)) * LN2, mask=rows < query_len)
        acc = acc / gl.convert_layout(mass, O_ROW)[:, None]
        # The front columns of the queries, no longer needed, make room for the results.
        store_rows(acc, q, out_ptr, out_stride_token, out_stride_head, work, CONSUMER, 1)
        turn += 1
        work = receive(queue, turn)


@gluon.jit
def multiply_keys(q, more_q, k, more_k, no_scores):
    """Begin the products of a consumer's queries with a tile's keys."""
    FRONT: gl.constexpr = k.shape[2]
    REST: gl.constexpr = more_k.shape[2]
    front = k.reshape([k.shape[0], FRONT]).permute((1, 0))
    rest = more_k.reshape([k.shape[0], REST]).permute((1, 0))
    scores = warpgroup_mma(q, front, no_scores, use_acc=False, is_async=True)
    return warpgroup_mma(more_q, rest, scores, is_async=True)
