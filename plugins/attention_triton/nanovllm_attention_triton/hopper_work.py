"""Distribution of work over the persistent programs of the prompt kernels for Hopper.

An item of work is a KV head of a block of rows. A program's first item is that of its number; each
later one costs a ticket, so a program that is done early takes more. A program's producer draws,
and tells its consumers through shared memory what it drew: an item behind the last tile of a long
one is found while that one is attended.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.
# ruff: noqa: RUF059 - a tuple stands for a structure, of which each function takes what it needs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)
"""Rows of a consumer: those of one instruction of the tensor cores."""
CONSUMERS = gl.constexpr(2)
HEADS_AT_ONCE = gl.constexpr(16)
"""KV heads whose row blocks are drawn by turns, so that several row blocks of a head run at once:
they read its keys from the L2."""
WORDS = gl.constexpr(8)
"""Room for what describes an item."""


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Of the places of keys and of values: full, and free again; and the consumers' turns."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=CONSUMERS)
        mbarrier.init(v_free.index(slot), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(order.index(consumer), count=1)
    return k_full, v_full, k_free, v_free, order


@gluon.jit
def make_queue():
    """The memory of two items of work, of this turn and the next, and its barriers."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], layout)
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    work_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for slot in gl.static_range(2):
        mbarrier.init(work_full.index(slot), count=1)
        mbarrier.init(work_free.index(slot), count=CONSUMERS)
    return words, work_full, work_free


@gluon.jit
def next_work(item, seqs, ticket_ptr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """What the item is or, where it has no tiles, the next that is drawn; no tiles at the end."""
    seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads, causal = seqs
    work = find_work(item, seqs, GROUP, BLOCK_N)
    while (work[5] == 0) & (item < num_row_blocks * num_kv_heads):
        item = draw_ticket(seqs, ticket_ptr)
        work = find_work(item, seqs, GROUP, BLOCK_N)
    return work


@gluon.jit
def draw_ticket(seqs, ticket_ptr):
    """The item of the next ticket; one beyond the last item for each program, at the end.

    There are as many tickets as items: each program's last draw is one too many, and its first item
    costs none. The program that draws the last ticket puts the counter back to 0.
    """
    seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads, causal = seqs
    ticket = gl.atomic_add(ticket_ptr, 1)
    if ticket == num_row_blocks * num_kv_heads - 1:
        gl.store(ticket_ptr, 0)
    return gl.num_programs(0) + ticket


@gluon.jit
def find_work(item, seqs, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """What an item is: KV head, sequence, first row, ..., and its number of tiles.

    The number of tiles is 0 where there is nothing to do. Heads come in groups of HEADS_AT_ONCE.
    Within a group the last row blocks come first, because they see the most keys. `causal`: a row
    sees the keys up to its own; else all.
    """
    seq_lens_ptr, query_start_ptr, num_seqs, num_row_blocks, num_kv_heads, causal = seqs
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    first_head = item // (HEADS_AT_ONCE * num_row_blocks) * HEADS_AT_ONCE
    num_heads = gl.maximum(gl.minimum(num_kv_heads - first_head, HEADS_AT_ONCE), 1)
    place = item - first_head * num_row_blocks
    # Queries are copied of an item beyond the last one, too.
    kv_head = gl.minimum(first_head + place % num_heads, num_kv_heads - 1)
    row_block = gl.maximum(num_row_blocks - 1 - place // num_heads, 0)
    seq, first_row = find_row_block(row_block, query_start_ptr, num_seqs, GROUP, BLOCK_M)
    query_start = gl.load(query_start_ptr + seq)
    query_len = gl.load(query_start_ptr + seq + 1) - query_start
    seq_len = gl.load(seq_lens_ptr + seq)
    end = seq_len
    if causal:
        last_row = gl.minimum(first_row + BLOCK_M, query_len * GROUP) - 1
        end = seq_len - query_len + last_row // GROUP + 1
    num_tiles = gl.cdiv(gl.maximum(end, 1), BLOCK_N)
    if (first_row >= query_len * GROUP) | (item >= num_row_blocks * num_kv_heads):
        num_tiles = 0
    return kv_head, first_row, query_start, query_len, seq_len, num_tiles, seq


@gluon.jit
def find_row_block(
    row_block, query_start_ptr, num_seqs, GROUP: gl.constexpr, BLOCK_M: gl.constexpr
):
    """The sequence of a block of rows, and the block's first row in it.

    Blocks are numbered as in `prefill_kernels.find_row_block`, but a sequence's in their order.
    """
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
def publish(queue, turn, work):
    """Tell the consumers what an item of work is; one of no tiles ends their turns."""
    words, work_full, work_free = queue
    mbarrier.wait(work_free.index(turn % 2), turn // 2 & 1 ^ 1)
    for word in gl.static_range(6):
        value = gl.full([1], work[word], gl.int32, word_layout(1))
        words.index(turn % 2 * WORDS + word).store(value)
    mbarrier.arrive(work_full.index(turn % 2), count=1)


@gluon.jit
def receive(queue, turn):
    """The work of a turn, as `find_work` describes it."""
    words, work_full, work_free = queue
    first = turn % 2 * WORDS
    mbarrier.wait(work_full.index(turn % 2), turn // 2 & 1)
    kv_head = gl.max(words.index(first).load(word_layout(4)), 0)
    first_row = gl.max(words.index(first + 1).load(word_layout(4)), 0)
    query_start = gl.max(words.index(first + 2).load(word_layout(4)), 0)
    query_len = gl.max(words.index(first + 3).load(word_layout(4)), 0)
    seq_len = gl.max(words.index(first + 4).load(word_layout(4)), 0)
    num_tiles = gl.max(words.index(first + 5).load(word_layout(4)), 0)
    mbarrier.arrive(work_free.index(turn % 2), count=1)
    return kv_head, first_row, query_start, query_len, seq_len, num_tiles


@gluon.constexpr_function
def word_layout(warps):
    """One number, the same in all threads."""
    return gl.BlockedLayout([1], [32], [warps], [0])
