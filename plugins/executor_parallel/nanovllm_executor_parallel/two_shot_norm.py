"""The two-shot all-reduce of whole rows, with the norm of the sum: shards of whole rows.

Slots and calls are those of `two_shot.py`, so that both kernels take turns. What goes over the
links is the sum: each rank norms all rows itself, also those of its own shard, from its memory, so
that all ranks do the same. `row_norm.py` explains waves.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_executor_parallel.row_norm import find_share, load_factors, norm_row
from nanovllm_executor_parallel.slots import (
    WAVES_AHEAD,
    add,
    arrive,
    begin,
    clear,
    find_peers,
    mark_as_sent,
    poll,
)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def two_shot_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, slots_ptr, peers_ptr, state_ptr, limit_ptr,
    failure_ptr, rank, num_rows,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, SEND: tl.constexpr, EPS: tl.constexpr,
    INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The residual becomes itself plus the sum of x; `normed` is its norm, row by row.

    All programs must be resident at once. A row has WORDS words; ROW is of the slots. SEND: words
    that a program sends at a time.
    """
    if DEPENDENT:
        gdc_launch_dependents()  # the next kernel fetches its weights while this one polls
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUMBERS: tl.constexpr = WORDS * 4 // (DTYPE.primitive_bitwidth // 8)
    ranks = tl.arange(0, PADDED_SIZE)
    peer_ptrs = find_peers(peers_ptr, rank, SIZE)  # before the wait
    columns = tl.arange(0, BLOCK)
    mask = columns < WORDS
    factors = load_factors(weight_ptr, columns, mask, DTYPE)
    if DEPENDENT:
        gdc_wait()
    x_words_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    residual_words_ptr = residual_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    normed_words_ptr = normed_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    num_words = num_rows * WORDS
    shard = tl.cdiv(num_rows, SIZE)
    call, slot, before, num_old_units = begin(state_ptr)
    limit = tl.load(limit_ptr, volatile=True)
    is_rank = (ranks < SIZE)[:, None]
    is_peer = is_rank & (ranks != rank)[:, None]
    parts = slot * 2 * SIZE * ROW
    sums = parts + SIZE * ROW
    mine = parts + rank * ROW
    waves = tl.cdiv(shard, tl.num_programs(0))
    for wave in range(0, min(WAVES_AHEAD, waves)):
        scatter(x_words_ptr, peer_ptrs, mine, wave, num_words, shard, rank, SIZE, WORDS, SEND)
    arrive(state_ptr, slot, shard * (WORDS // 4))
    rows_ptr = slots_ptr + ranks[:, None] * ROW
    old_ptr = rows_ptr + before * 2 * SIZE * ROW
    clear(old_ptr, is_peer, num_old_units, PADDED_SIZE, SEND)
    clear(old_ptr + SIZE * ROW, is_rank, num_old_units, PADDED_SIZE, SEND)
    for wave in range(0, waves + WAVES_AHEAD):
        if wave + WAVES_AHEAD < waves:
            ahead = wave + WAVES_AHEAD
            scatter(x_words_ptr, peer_ptrs, mine, ahead, num_words, shard, rank, SIZE, WORDS, SEND)
        if wave < waves:
            limit = reduce(
                x_words_ptr, residual_words_ptr, rows_ptr + parts, slots_ptr, peer_ptrs,
                sums + rank * ROW, wave, num_words, shard, is_peer, limit, call, limit_ptr,
                failure_ptr, ranks, rank, SIZE, WORDS, SEND, DTYPE, INTERPRETED,
            )  # fmt: skip
        if wave >= WAVES_AHEAD:
            limit = gather(
                residual_words_ptr, normed_words_ptr, factors, slots_ptr + sums,
                wave - WAVES_AHEAD, num_rows, shard, columns, mask, limit, call, limit_ptr,
                failure_ptr, rank, SIZE, ROW, WORDS, DTYPE, NUMBERS, EPS, INTERPRETED,
            )  # fmt: skip


@triton.jit
def scatter(
    x_ptr, peer_ptrs, part_at, wave, num_words, shard, rank,
    SIZE: tl.constexpr, WORDS: tl.constexpr, SEND: tl.constexpr,
):  # fmt: skip
    """Store this program's share of a wave of each other rank's shard at `part_at` there."""
    first, last = find_share(wave, shard, WORDS)
    for start in range(first, last, SEND):
        columns = start + tl.arange(0, SEND)
        sent = ()
        for step in tl.static_range(SIZE - 1):  # all loads are on their way before a store waits
            at = (rank + 1 + step) % SIZE * (shard * WORDS) + columns
            sent += (mark_as_sent(tl.load(x_ptr + at, mask=at < num_words, other=0)),)
        for step in tl.static_range(SIZE - 1):
            tl.store(peer_ptrs[step] + part_at + columns, sent[step], mask=columns < last)


@triton.jit
def reduce(
    x_ptr, residual_ptr, parts_ptr, slots_ptr, peer_ptrs, sum_at, wave, num_words, shard,
    is_peer, limit, call, limit_ptr, failure_ptr, ranks, rank,
    SIZE: tl.constexpr, WORDS: tl.constexpr, SEND: tl.constexpr, DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store this program's share of a wave of this shard's sum at `sum_at` of all memories."""
    first, last = find_share(wave, shard, WORDS)
    for start in range(first, last, SEND):
        columns = start + tl.arange(0, SEND)
        mask = columns < last
        at = rank * (shard * WORDS) + columns
        words = mark_as_sent(tl.load(x_ptr + at, mask=mask & (at < num_words), other=0))
        residual = tl.load(residual_ptr + at, mask=mask & (at < num_words), other=0)
        received, limit = poll(
            parts_ptr + columns[None, :], is_peer & mask[None, :],
            limit, call, limit_ptr, failure_ptr, ranks, SIZE, INTERPRETED,
        )  # fmt: skip
        every = tl.where((ranks == rank)[:, None], words[None, :], received)
        out = mark_as_sent(add(every, residual, True, DTYPE))
        for step in tl.static_range(SIZE - 1):
            tl.store(peer_ptrs[step] + sum_at + columns, out, mask=mask)
        tl.store(slots_ptr + sum_at + columns, out, mask=mask)
    return limit


@triton.jit
def gather(
    residual_ptr, normed_ptr, factors, sums_ptr, wave, num_rows, shard, columns, mask,
    limit, call, limit_ptr, failure_ptr, rank,
    SIZE: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr,
    NUMBERS: tl.constexpr, EPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the sums of a wave of all shards and their norms: whole rows by turns."""
    num_programs = tl.num_programs(0)
    rows = min(num_programs, shard - wave * num_programs)
    for index in range(tl.program_id(0), rows * SIZE, num_programs):
        peer = (rank + index // rows) % SIZE
        row = wave * num_programs + index % rows
        received, limit = poll(
            (sums_ptr + peer * ROW + row * WORDS + columns)[None, :], mask[None, :],
            limit, call, limit_ptr, failure_ptr, tl.full((1,), 0, tl.int32) + peer,
            SIZE, INTERPRETED,
        )  # fmt: skip
        out = tl.sum(received, 0)
        at = (peer * shard + row) * WORDS + columns
        is_row = mask & (peer * shard + row < num_rows)
        tl.store(residual_ptr + at, out, mask=is_row)
        normed = norm_row(out, factors, DTYPE, NUMBERS, EPS)
        tl.store(normed_ptr + at, normed, mask=is_row)
    return limit
