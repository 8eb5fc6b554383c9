"""The one-shot all-reduce of whole rows, with the norm of the sum: a program has whole rows.

Slots and calls are those of `one_shot.py`, so that both kernels take turns. `row_norm.py` explains
waves.
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
def one_shot_norm_kernel(
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
    call, slot, before, num_old_units = begin(state_ptr)
    limit = tl.load(limit_ptr, volatile=True)
    part = (slot * SIZE + rank) * ROW
    num_programs = tl.num_programs(0)
    waves = tl.cdiv(num_rows, num_programs)
    for wave in range(0, min(WAVES_AHEAD, waves)):
        send(x_words_ptr, peer_ptrs, part, wave, num_rows, SIZE, WORDS, SEND)
    arrive(state_ptr, slot, num_rows * (WORDS // 4))
    is_peer = ((ranks < SIZE) & (ranks != rank))[:, None]
    parts_ptr = slots_ptr + ranks[:, None] * ROW
    clear(parts_ptr + before * SIZE * ROW, is_peer, num_old_units, PADDED_SIZE, SEND)
    for wave in range(0, waves):
        if wave + WAVES_AHEAD < waves:
            send(x_words_ptr, peer_ptrs, part, wave + WAVES_AHEAD, num_rows, SIZE, WORDS, SEND)
        row = wave * num_programs + tl.program_id(0)
        if row < num_rows:
            at = row * WORDS + columns
            words = mark_as_sent(tl.load(x_words_ptr + at, mask=mask, other=0))
            residual = tl.load(residual_words_ptr + at, mask=mask, other=0)
            received, limit = poll(
                parts_ptr + slot * SIZE * ROW + at[None, :], is_peer & mask[None, :],
                limit, call, limit_ptr, failure_ptr, ranks, SIZE, INTERPRETED,
            )  # fmt: skip
            every = tl.where((ranks == rank)[:, None], words[None, :], received)
            out = add(every, residual, True, DTYPE)
            tl.store(residual_words_ptr + at, out, mask=mask)
            tl.store(normed_words_ptr + at, norm_row(out, factors, DTYPE, NUMBERS, EPS), mask=mask)


@triton.jit
def send(
    x_ptr, peer_ptrs, part_at, wave, num_rows,
    SIZE: tl.constexpr, WORDS: tl.constexpr, SEND: tl.constexpr,
):  # fmt: skip
    """Store this program's share of a wave of x at `part_at` of all other memories."""
    first, last = find_share(wave, num_rows, WORDS)
    for start in range(first, last, SEND):
        columns = start + tl.arange(0, SEND)
        mask = columns < last
        words = mark_as_sent(tl.load(x_ptr + columns, mask=mask, other=0))
        for step in tl.static_range(SIZE - 1):
            tl.store(peer_ptrs[step] + part_at + columns, words, mask=mask)
