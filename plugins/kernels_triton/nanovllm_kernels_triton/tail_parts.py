"""The captured tail over ranks: each has the logits of some ids, and no rank needs those of others.

A rank leaves a part of each row behind `tail`'s kernel: its best id where the row is not cut, its
`top_k` likeliest, MAX_RANKED at most, where it is, and for log-probabilities the likeliest of the
logits as they are, with the sum of all. Of equal logits the lowest ids are taken, so the ids that a
row may choose are among the parts of its ranks, however many tie. Every rank then joins the parts
of all, and gets the same bits.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_core.kernels.device_functions import (
    find_cut,
    keep_of_tile,
    noise_keys,
    score_of,
    take_turn,
    weigh,
)
from nanovllm_kernels_triton.edits import (
    COUNTED,
    FLAGS,
    FORBIDS,
    MAX_BIASES,
    PENALISED,
    edits_of,
    load_float,
    read_columns,
)
from nanovllm_kernels_triton.tail import (
    CUT,
    LOG2_E,
    MAX_RANKED,
    MAX_STOP_IDS,
    NONE,
    NUM_COLUMNS,
    NUM_STATS,
    NUM_TOP,
    SLOTS,
    TOP_K,
)
from nanovllm_kernels_triton.tail_merge import (
    GROUP,
    LOG_MIN_P,
    LOGPROBS,
    TOP_P,
    best_of_splits,
    gather_candidates,
    rank_candidates,
    store_logprobs,
)

# The numbers of a part, int32; floats are stored by their bits.
BEST_SCORE = tl.constexpr(0)
BEST_ID = tl.constexpr(1)
BEST_LOGIT = tl.constexpr(2)
"""As the model gave it, like FIRST_LOGIT and LOGITS; others are edited."""
TOP = tl.constexpr(3)
"""The largest logit as the model gave it, and SUM, that of all probabilities, 1 at TOP."""
SUM = tl.constexpr(4)
FIRST_LOGIT = tl.constexpr(5)
"""That of the rank's first id."""
VALUES = tl.constexpr(8)
"""MAX_RANKED logits, then as many IDS and LOGITS; those that are none have the id NONE."""
IDS = tl.constexpr(VALUES.value + MAX_RANKED.value)
LOGITS = tl.constexpr(IDS.value + MAX_RANKED.value)
NUM_LIKELIEST = tl.constexpr(32)
"""Room for MAX_ROW_LOGPROBS."""
LIKELIEST = tl.constexpr(LOGITS.value + MAX_RANKED.value)
"""NUM_LIKELIEST logits as the model gave them, then as many ids."""
LIKELIEST_IDS = tl.constexpr(LIKELIEST.value + NUM_LIKELIEST.value)
PART = tl.constexpr(LIKELIEST_IDS.value + NUM_LIKELIEST.value)


@triton.jit
def store_float(pointer, value, mask=None):
    """Store floats by their bits."""
    tl.store(pointer, value.to(tl.float32).to(tl.int32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "plain_splits", "max_entries"])
def make_part_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, biases_ptr, stop_ids_ptr, min_tokens_ptr, halves_ptr,
    scores_ptr, score_ids_ptr, stats_ptr, values_ptr, ids_ptr, parts_ptr,
    num_columns, num_ids, num_splits, plain_splits, num_words, max_entries,
    FIRST_ID: tl.constexpr, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PLAIN_SPLITS: tl.constexpr, APPROXIMATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for each entry: this rank's part of it."""
    take_turn(DEPENDENT)
    entry = tl.program_id(0)
    if tl.load(skip_ptr) != 0:
        return
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row = row.to(tl.int64)
    params_ptr += row * NUM_COLUMNS
    parts_ptr += entry * PART
    asked = tl.load(params_ptr + FLAGS)
    num_top = tl.load(params_ptr + NUM_TOP)
    top_k = tl.load(params_ptr + TOP_K)
    row_ptr = logits_ptr + entry.to(tl.int64) * num_columns
    if (asked & CUT) == 0:
        at = entry * PLAIN_SPLITS
        score, best = best_of_splits(
            scores_ptr + at, score_ids_ptr + at,
            tl.where(asked == 0, plain_splits, num_splits), PLAIN_SPLITS,
        )  # fmt: skip
        store_float(parts_ptr + BEST_SCORE, score)
        tl.store(parts_ptr + BEST_ID, best)
        if num_top < 0:
            return
        column = best - FIRST_ID
        logit = tl.load(row_ptr + column, mask=column < num_ids, other=float("-inf"))
        store_float(parts_ptr + BEST_LOGIT, logit)
    elif top_k > MAX_RANKED:
        return
    logit = tl.load(row_ptr, mask=num_ids > 0, other=float("-inf"))
    store_float(parts_ptr + FIRST_LOGIT, logit)

    temperature = tl.load(temperature_ptr + row)
    index = tl.load(output_index_ptr + entry)
    for job in range(tl.where((asked & CUT) == 0, 1, 0), tl.where(num_top < 0, 1, 2)):
        flags = tl.where(index < tl.load(min_tokens_ptr + row), asked, asked & ~FORBIDS)
        scale = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature)) * LOG2_E
        want = top_k
        if job == 1:  # of the logits as they are
            flags *= 0
            scale = scale * 0.0 + LOG2_E
            want = tl.maximum(num_top, 1)
        slots = (job * max_entries + entry).to(tl.int64) * MAX_SPLITS
        row_values_ptr, row_ids_ptr = values_ptr + slots * SLOTS, ids_ptr + slots * SLOTS
        top, total, _, num_found, is_complete = gather_candidates(
            stats_ptr + slots * NUM_STATS, row_values_ptr, row_ids_ptr, num_splits, scale,
            want, MAX_SPLITS,
        )  # fmt: skip
        # Ids that are forbidden are no candidates, but may be among the likeliest.
        if (is_complete & ((job == 0) | (num_found >= tl.minimum(want, num_ids)))) == 0:
            edits = edits_of(
                flags, params_ptr, halves_ptr + row * num_words * 2,
                biases_ptr + row * 2 * MAX_BIASES, stop_ids_ptr + row * MAX_STOP_IDS,
                temperature, 0.0, FIRST_ID,
            )  # fmt: skip
            num_found = find_likeliest(
                row_ptr, num_ids, want.to(tl.int64), edits, row_values_ptr, row_ids_ptr, TILE
            )
        x, ids, rank, _ = rank_candidates(row_values_ptr, row_ids_ptr, num_found, top, scale)
        there = (tl.arange(0, SLOTS) < num_found) & (rank < want)
        if job == 0:
            logits = tl.load(row_ptr + ids - FIRST_ID, mask=there, other=float("-inf"))
            store_ranked(parts_ptr + VALUES, parts_ptr + IDS, x, ids, rank, there, MAX_RANKED)
            store_float(parts_ptr + LOGITS + tl.where(there, rank, 0), logits, there)
        else:
            likeliest_ptr = parts_ptr + LIKELIEST
            ids_of_likeliest_ptr = parts_ptr + LIKELIEST_IDS
            store_ranked(likeliest_ptr, ids_of_likeliest_ptr, x, ids, rank, there, NUM_LIKELIEST)
            store_float(parts_ptr + TOP, top)
            store_float(parts_ptr + SUM, total)


@triton.jit
def find_likeliest(row_ptr, num_ids, want, edits, values_ptr, ids_ptr, TILE: tl.constexpr):
    """Put a row's `want` likeliest ids into the slots, in their order; returns how many these are.

    Of equal logits the lowest ids.
    """
    threshold, room = find_cut(row_ptr, num_ids, want, 2.0, 1.0, 0.0, edits, TILE, read_columns)
    num_at = tl.full((), 0, tl.int64)
    num_found = tl.full((), 0, tl.int32)
    lanes = tl.arange(0, TILE)
    for first in range(0, num_ids, TILE):
        x = read_columns(row_ptr, first, num_ids, TILE, edits)
        keep, num_at = keep_of_tile(x, threshold, room, num_at, first, num_ids, TILE)
        keep &= first + lanes < num_ids
        place = num_found + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(values_ptr + place, x, mask=keep)
        tl.store(ids_ptr + place, edits[11] + first + lanes, mask=keep)
        num_found += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num_found


@triton.jit
def store_ranked(values_ptr, ids_ptr, x, ids, rank, there, NUM: tl.constexpr):
    """Store the logits and ids that are `there` by rank, and NONE behind them."""
    places = tl.arange(0, NUM)
    store_float(values_ptr + places, tl.full((NUM,), float("-inf"), tl.float32))
    tl.store(ids_ptr + places, tl.full((NUM,), NONE, tl.int32))
    tl.debug_barrier()
    place = tl.where(there, rank, 0)
    store_float(values_ptr + place, x, there)
    tl.store(ids_ptr + place, ids, mask=there)


@triton.jit(do_not_specialize=["rank_stride"])
def join_parts_kernel(
    parts_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, out_ptr, logprobs_ptr, rank_stride,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, APPROXIMATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for each entry: its token, and its log-probabilities, of the parts of all ranks.

    `parts_ptr` [RANKS, entries, PART]. Nothing is written for rows that `tail_partial_kernel` left
    out.
    """
    take_turn(DEPENDENT)
    entry = tl.program_id(0)
    if tl.load(skip_ptr) != 0:
        return
    row = tl.load(rows_ptr + entry)
    if row < 0:
        tl.store(out_ptr + entry, -1)
        return
    row = row.to(tl.int64)
    params_ptr += row * NUM_COLUMNS
    parts_ptr += entry * PART
    asked = tl.load(params_ptr + FLAGS)
    num_top = tl.load(params_ptr + NUM_TOP)
    top_k = tl.load(params_ptr + TOP_K)
    if ((asked & CUT) != 0) & (top_k > MAX_RANKED):
        return
    if asked & PENALISED:
        tl.store(params_ptr + COUNTED, tl.load(num_known_ptr + entry))

    if (asked & CUT) == 0:
        answer, logit = best_of_ranks(parts_ptr, rank_stride, RANKS, BLOCK_RANKS)
    else:
        key_1, key_2 = noise_keys(seed_ptr, row, tl.load(output_index_ptr + entry))
        answer, logit = choose_of_candidates(
            parts_ptr, tl.load(temperature_ptr + row), top_k, load_float(params_ptr + TOP_P),
            load_float(params_ptr + LOG_MIN_P), key_1, key_2, rank_stride,
            RANKS, BLOCK_RANKS, APPROXIMATE,
        )  # fmt: skip
    tl.store(out_ptr + entry, answer)

    if num_top >= 0:
        ranks = tl.arange(0, BLOCK_RANKS)
        tops = load_floats(parts_ptr + ranks * rank_stride + TOP, ranks < RANKS)
        sums = load_floats(parts_ptr + ranks * rank_stride + SUM, ranks < RANKS)
        sums = tl.where(ranks < RANKS, sums, 0.0)
        top = tl.max(tops, axis=0)
        total = tl.sum(sums * weigh(tops, top, LOG2_E), axis=0)
        x, ids = load_candidates(
            parts_ptr + LIKELIEST, parts_ptr + LIKELIEST_IDS, rank_stride,
            RANKS, BLOCK_RANKS, NUM_LIKELIEST,
        )  # fmt: skip
        rank, _ = compare_parts(
            parts_ptr + LIKELIEST, parts_ptr + LIKELIEST_IDS, x, ids, top, LOG2_E, rank_stride,
            RANKS, NUM_LIKELIEST,
        )  # fmt: skip
        store_logprobs(
            logprobs_ptr + entry * LOGPROBS, logit, x, ids, rank,
            (ids != NONE) & (rank < num_top), top, tl.log(total),
        )  # fmt: skip


@triton.jit
def best_of_ranks(parts_ptr, rank_stride, RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """The id of the best score, of equal ones the lowest, and its logit as the model gave it."""
    ranks = tl.arange(0, BLOCK_RANKS)
    rank_ptrs = parts_ptr + ranks * rank_stride
    scores = load_floats(rank_ptrs + BEST_SCORE, ranks < RANKS)
    ids = tl.load(rank_ptrs + BEST_ID, mask=ranks < RANKS, other=NONE)
    answer = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, NONE), axis=0)
    logits = load_floats(rank_ptrs + BEST_LOGIT, ranks < RANKS)
    return answer, tl.max(tl.where(ids == answer, logits, float("-inf")), axis=0)


@triton.jit
def choose_of_candidates(
    parts_ptr, temperature, top_k, top_p, log_min_p, key_1, key_2, rank_stride,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """The same of the ids that the cuts keep; id 0 where nothing is left."""
    values_ptr, ids_ptr = parts_ptr + VALUES, parts_ptr + IDS
    x, ids = load_candidates(values_ptr, ids_ptr, rank_stride, RANKS, BLOCK_RANKS, MAX_RANKED)
    scale = tl.div_rn(1.0, temperature) * LOG2_E
    top = tl.max(x, axis=0)
    rank, before = compare_parts(
        values_ptr, ids_ptr, x, ids, top, scale, rank_stride, RANKS, MAX_RANKED
    )
    # Without a min_p, none: a top of +inf would make it NaN.
    is_floored = log_min_p > float("-inf")
    least = tl.where(is_floored, tl.div_rn(top, temperature) + log_min_p, float("-inf"))
    keep = (ids != NONE) & (rank < top_k) & (tl.div_rn(x, temperature) >= least)
    kept = tl.sum(tl.where(keep, weigh(x, top, scale), 0.0), axis=0)
    keep &= (before < top_p * kept) | (rank == 0)
    scores = score_of(x, ids, scale, key_1, key_2, APPROXIMATE)
    scores = tl.where(keep, scores, float("-inf"))
    answer = tl.min(tl.where(keep & (scores == tl.max(scores, axis=0)), ids, NONE), axis=0)
    logits, _ = load_candidates(
        parts_ptr + LOGITS, ids_ptr, rank_stride, RANKS, BLOCK_RANKS, MAX_RANKED
    )
    logit = tl.max(tl.where(ids == answer, logits, float("-inf")), axis=0)
    logit = tl.where(answer == NONE, load_float(parts_ptr + FIRST_LOGIT), logit)
    return tl.where(answer == NONE, 0, answer), logit


@triton.jit
def load_floats(pointers, mask):
    """Floats that are stored by their bits; -inf beyond the mask."""
    return tl.load(pointers, mask=mask, other=-0x800000).to(tl.float32, bitcast=True)


@triton.jit
def load_candidates(
    values_ptr, ids_ptr, rank_stride,
    RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """The floats and ids of all ranks, NUM of each; -inf and NONE where there is none."""
    lanes = tl.arange(0, BLOCK_RANKS * NUM)
    places = lanes // NUM * rank_stride + lanes % NUM
    mask = lanes < RANKS * NUM
    x = load_floats(values_ptr + places, mask)
    ids = tl.load(ids_ptr + places, mask=mask, other=NONE)
    return tl.where(ids == NONE, float("-inf"), x), ids


@triton.jit
def compare_parts(
    values_ptr, ids_ptr, x, ids, top, scale, rank_stride,
    RANKS: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Each candidate's rank, by logit and then by id, among all, and the weight of those ahead."""
    rank = tl.zeros_like(ids)
    before = tl.zeros_like(x)
    for other_rank in range(RANKS):
        for start in range(0, NUM, GROUP):
            others = other_rank * rank_stride + start + tl.arange(0, GROUP)
            other_x = load_floats(values_ptr + others, others >= 0)
            other_ids = tl.load(ids_ptr + others)
            is_ahead = (other_x[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
            is_ahead |= other_x[None, :] > x[:, None]
            rank += tl.sum(is_ahead.to(tl.int32), axis=1)
            other_weight = weigh(other_x, top, scale)
            before += tl.sum(tl.where(is_ahead, other_weight[None, :], 0.0), axis=1)
    return rank, before
