"""One-shot all-reduce for few rows: every rank stores its part into the memory of all ranks.

In call c a rank stores its x into its row of slot c of all other ranks, clears slot c - 1 of its
own memory, polls slot c, and stores the sum: `slots.py` explains why no barrier is needed.

Order. Each rank adds the parts of all ranks in the same order in float32 and rounds once, so the
result has equal bits on all ranks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_executor_parallel.one_shot_norm import one_shot_norm_kernel
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


@triton.jit(do_not_specialize=["rank", "num_units"])
def one_shot_kernel(
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
    call, slot, before, num_old_units = begin(state_ptr)
    limit = tl.load(limit_ptr, volatile=True)
    part = (slot * SIZE + rank) * ROW
    num_words = num_units * 4
    for start in range(first, min(first + AHEAD * stride, num_words), stride):
        send(x_words_ptr, peer_ptrs, part, start, num_words, SIZE, BLOCK)
    arrive(state_ptr, slot, num_units)
    is_peer = ((ranks < SIZE) & (ranks != rank))[:, None]
    parts_ptr = slots_ptr + ranks[:, None] * ROW
    clear(parts_ptr + before * SIZE * ROW, is_peer, num_old_units, PADDED_SIZE, BLOCK)
    for start in range(first, num_words, stride):
        if start + AHEAD * stride < num_words:
            ahead = start + AHEAD * stride
            send(x_words_ptr, peer_ptrs, part, ahead, num_words, SIZE, BLOCK)
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_words
        words = mark_as_sent(tl.load(x_words_ptr + columns, mask=mask, other=0))
        residual = words
        if HAS_RESIDUAL:
            residual = tl.load(out_words_ptr + columns, mask=mask, other=0)
        received_ptrs = parts_ptr + slot * SIZE * ROW + columns[None, :]
        received, limit = poll(
            received_ptrs, is_peer & mask[None, :], limit, call, limit_ptr, failure_ptr, ranks,
            SIZE, INTERPRETED,
        )  # fmt: skip
        every = tl.where((ranks == rank)[:, None], words[None, :], received)
        out = add(every, residual, HAS_RESIDUAL, x_ptr.dtype.element_ty)
        tl.store(out_words_ptr + columns, out, mask=mask)


@triton.jit
def send(x_ptr, peer_ptrs, part_at, start, num_words, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block of x at `part_at` of all other memories."""
    columns = start + tl.arange(0, BLOCK)
    mask = columns < num_words
    words = mark_as_sent(tl.load(x_ptr + columns, mask=mask, other=0))
    for step in tl.static_range(SIZE - 1):
        tl.store(peer_ptrs[step] + part_at + columns, words, mask=mask)


class OneShotAllReduce(SlotAllReduce):
    """Sends x whole to every other rank."""

    name = "one-shot"
    kernel = one_shot_kernel
    norm_kernel = one_shot_norm_kernel
    num_areas = 1

    @staticmethod
    def rows_of_x(size: int) -> int:
        return 1
