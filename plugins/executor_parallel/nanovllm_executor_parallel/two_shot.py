"""Two-shot all-reduce for more rows: each rank sums a shard of x and stores it into all memories.

A rank sends 2 (N - 1) / N of x, where the one-shot kernel sends N - 1 times x. x is divided into N
shards of equal numbers of blocks; zeros stand for what is behind its end. Rank r owns shard r.

A slot has two areas of a row for each rank: `parts`, what that rank adds to this rank's shard, and
`sums`, the sum of that rank's shard. In call c a rank

1. scatters: it stores each other rank's shard of its x into that rank's parts in slot c,
2. clears both areas of slot c - 1 of its own memory,
3. reduces: it polls the parts of its own shard, and stores their sum into the sums of all ranks,
4. gathers: it polls the sums of the other shards, and stores them into the result.

A program takes the same blocks of all shards. It scatters AHEAD blocks before it reduces the first,
and reduces as many before it gathers the first. Programs share no word of x.

Why three slots are enough, for both areas. In every call a rank waits for all words that the others
send to it. So nothing of call c - 1 is on its way when call c clears its slot. Another rank writes
that slot again, in either area, in call c + 2, after it has ended call c + 1. By then it has seen
this rank's parts of call c + 1, which this rank sends after its call c and the clearing have ended.

Order. The owner adds the parts in the order of the ranks in float32, adds the residual, and rounds
once: the bits of the one-shot kernel. All ranks get the owner's words. A sum that equals the
sentinel becomes zero on the owner too; only a float32 of -4.6e-41 can.

A rank that does not come is the one that all others report: each of their programs waits for its
parts before it waits for a sum, because every shard has as many blocks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_executor_parallel.slots import (
    AHEAD,
    SlotAllReduce,
    add,
    arrive,
    begin,
    clear,
    find_peers,
    mark_as_sent,
    poll,
)
from nanovllm_executor_parallel.two_shot_norm import two_shot_norm_kernel


@triton.jit(do_not_specialize=["rank", "num_units"])
def two_shot_kernel(
    x_ptr, residual_ptr, slots_ptr, peers_ptr, state_ptr, limit_ptr, failure_ptr, rank, num_units,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Blocks of words by programs of one warp, which needs no barrier of its own.

    x becomes the sum over ranks; with a residual, the residual becomes itself plus the sum. All
    programs must be resident at once. `num_units` counts 16 bytes; ROW is in words.
    """
    if DEPENDENT:
        gdc_launch_dependents()  # the next kernel fetches its weights while this one polls
    ranks = tl.arange(0, PADDED_SIZE)
    peer_ptrs = find_peers(peers_ptr, rank, SIZE)  # before the wait
    if DEPENDENT:
        gdc_wait()
    x_words_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    out_words_ptr = x_words_ptr
    if HAS_RESIDUAL:
        out_words_ptr = residual_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    num_words = num_units * 4
    shard = tl.cdiv(tl.cdiv(num_words, BLOCK), SIZE) * BLOCK
    call, slot, before, num_old_units = begin(state_ptr)
    limit = tl.load(limit_ptr, volatile=True)
    rows_ptr = slots_ptr + ranks[:, None] * ROW
    is_peer = ((ranks < SIZE) & (ranks != rank))[:, None]
    parts = slot * 2 * SIZE * ROW
    sums = parts + SIZE * ROW
    mine = parts + rank * ROW
    for start in range(first, min(first + AHEAD * stride, shard), stride):
        scatter(x_words_ptr, peer_ptrs, mine, start, num_words, shard, rank, SIZE, BLOCK)
    arrive(state_ptr, slot, shard // 4)
    old_ptr = rows_ptr + before * 2 * SIZE * ROW
    clear(old_ptr, is_peer, num_old_units, PADDED_SIZE, BLOCK)
    clear(old_ptr + SIZE * ROW, (ranks < SIZE)[:, None], num_old_units, PADDED_SIZE, BLOCK)
    for start in range(first, shard + AHEAD * stride, stride):
        if start + AHEAD * stride < shard:
            ahead = start + AHEAD * stride
            scatter(x_words_ptr, peer_ptrs, mine, ahead, num_words, shard, rank, SIZE, BLOCK)
        if start < shard:
            limit = reduce(
                x_words_ptr, out_words_ptr, rows_ptr + parts, peer_ptrs, sums + rank * ROW, start,
                num_words, shard, is_peer, limit, call, limit_ptr, failure_ptr, ranks, rank,
                SIZE, BLOCK, HAS_RESIDUAL, x_ptr.dtype.element_ty, INTERPRETED,
            )  # fmt: skip
        if start - AHEAD * stride >= 0:
            limit = gather(
                out_words_ptr, rows_ptr + sums, start - AHEAD * stride, num_words, shard, is_peer,
                limit, call, limit_ptr, failure_ptr, ranks, SIZE, BLOCK, INTERPRETED,
            )  # fmt: skip


@triton.jit
def scatter(
    x_ptr, peer_ptrs, part_at, start, num_words, shard, rank,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of each other rank's shard of x at `part_at` of its memory."""
    columns = start + tl.arange(0, BLOCK)
    sent = ()
    for step in tl.static_range(SIZE - 1):  # all loads are on their way before a store waits
        at = (rank + 1 + step) % SIZE * shard + columns
        sent += (mark_as_sent(tl.load(x_ptr + at, mask=at < num_words, other=0)),)
    for step in tl.static_range(SIZE - 1):
        tl.store(peer_ptrs[step] + part_at + columns, sent[step])


@triton.jit
def reduce(
    x_ptr, out_ptr, parts_ptr, peer_ptrs, sum_at, start,
    num_words, shard, is_peer, limit, call, limit_ptr, failure_ptr, ranks, rank,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store a block of this rank's shard's sum in the result, and at `sum_at` of all memories."""
    columns = start + tl.arange(0, BLOCK)
    at = rank * shard + columns
    mask = at < num_words
    words = mark_as_sent(tl.load(x_ptr + at, mask=mask, other=0))
    residual = words
    if HAS_RESIDUAL:
        residual = tl.load(out_ptr + at, mask=mask, other=0)
    received, limit = poll(
        parts_ptr + columns[None, :], is_peer, limit, call, limit_ptr, failure_ptr, ranks,
        SIZE, INTERPRETED,
    )  # fmt: skip
    every = tl.where((ranks == rank)[:, None], words[None, :], received)
    out = mark_as_sent(add(every, residual, HAS_RESIDUAL, DTYPE))
    for step in tl.static_range(SIZE - 1):
        tl.store(peer_ptrs[step] + sum_at + columns, out)
    tl.store(out_ptr + at, out, mask=mask)
    return limit


@triton.jit
def gather(
    out_ptr, sums_ptr, start, num_words, shard, is_peer, limit, call, limit_ptr, failure_ptr,
    ranks, SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store a block of the sum of each other shard in the result."""
    columns = start + tl.arange(0, BLOCK)[None, :]
    received, limit = poll(
        sums_ptr + columns, is_peer, limit, call, limit_ptr, failure_ptr, ranks, SIZE, INTERPRETED
    )
    at = ranks[:, None] * shard + columns
    tl.store(out_ptr + at, received, mask=is_peer & (at < num_words))
    return limit


class TwoShotAllReduce(SlotAllReduce):
    """Sends each rank its shard, and the sum of its own shard to all."""

    name = "two-shot"
    kernel = two_shot_kernel
    norm_kernel = two_shot_norm_kernel
    num_areas = 2

    @staticmethod
    def rows_of_x(size: int) -> int:
        return size
