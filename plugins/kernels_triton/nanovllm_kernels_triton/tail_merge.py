"""The captured tail's second kernel: a row's token, and its log-probabilities.

A program per row raises the floor of its candidates (see `tail`) until at most SLOTS are left, and
ranks these by comparing all pairs. Where they cannot say what is kept (`top_k` above `MAX_RANKED`,
a `top_p` that they do not hold, ties beyond all slots) it passes over the whole row.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_core.api import LOGPROB_COLUMNS, RowColumn
from nanovllm_core.kernels.device_functions import (
    find_cut,
    keep_of_tile,
    noise_keys,
    score_of,
    take_turn,
    to_float,
    to_key,
    weigh,
)
from nanovllm_kernels_triton.edits import (
    COUNTED,
    FLAGS,
    FLOORED,
    FORBIDS,
    MAX_BIASES,
    PENALISED,
    edits_of,
    load_float,
    read_edited,
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
    find_floor,
)

TOP_P = tl.constexpr(int(RowColumn.TOP_P))
LOG_MIN_P = tl.constexpr(int(RowColumn.LOG_MIN_P))
LOGPROBS = tl.constexpr(LOGPROB_COLUMNS)

GROUP = tl.constexpr(32)
"""Candidates are compared with so many at once."""
OF_MINUS_INF = tl.constexpr(0x007FFFFF)
"""`to_key(-inf)`."""


@triton.jit(do_not_specialize=["num_splits", "plain_splits", "max_entries"])
def tail_merge_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, biases_ptr, stop_ids_ptr, min_tokens_ptr, halves_ptr,
    scores_ptr, score_ids_ptr, stats_ptr, values_ptr, ids_ptr,
    out_ptr, logprobs_ptr,
    vocab_size, num_splits, plain_splits, num_words, max_entries,
    TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, PLAIN_SPLITS: tl.constexpr,
    APPROXIMATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for each entry: its token, then its log-probabilities."""
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
    asked = tl.load(params_ptr + FLAGS)
    num_top = tl.load(params_ptr + NUM_TOP)
    if asked & PENALISED:
        tl.store(params_ptr + COUNTED, tl.load(num_known_ptr + entry))
    answer = tl.full((), 0, tl.int32)
    if (asked & CUT) == 0:
        at = entry * PLAIN_SPLITS
        _, answer = best_of_splits(
            scores_ptr + at, score_ids_ptr + at,
            tl.where(asked == 0, plain_splits, num_splits), PLAIN_SPLITS,
        )  # fmt: skip
        tl.store(out_ptr + entry, answer)
        if num_top < 0:
            return

    index = tl.load(output_index_ptr + entry)
    key_1, key_2 = noise_keys(seed_ptr, row, index)
    row_ptr = logits_ptr + entry.to(tl.int64) * vocab_size
    for job in range(tl.where((asked & CUT) == 0, 1, 0), tl.where(num_top < 0, 1, 2)):
        flags = tl.where(index < tl.load(min_tokens_ptr + row), asked, asked & ~FORBIDS)
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(params_ptr + TOP_K)
        top_p = load_float(params_ptr + TOP_P)
        log_min_p = load_float(params_ptr + LOG_MIN_P)
        if job == 1:  # the likeliest of the logits as they are
            flags *= 0
            temperature = temperature * 0.0 + 1.0
            top_k = tl.maximum(num_top, 1)
            top_p = top_p * 0.0 + 2.0
            log_min_p += float("-inf")
        scale = tl.div_rn(1.0, temperature) * LOG2_E

        slots = (job * max_entries + entry).to(tl.int64) * MAX_SPLITS
        row_values_ptr, row_ids_ptr = values_ptr + slots * SLOTS, ids_ptr + slots * SLOTS
        top, total, lowest, num_found, is_complete = gather_candidates(
            stats_ptr + slots * NUM_STATS, row_values_ptr, row_ids_ptr, num_splits, scale,
            tl.minimum(top_k, MAX_RANKED), MAX_SPLITS,
        )  # fmt: skip

        held = weight_of_candidates(row_values_ptr, num_found, top, scale)
        # Without a min_p, none: a top of +inf would make it NaN.
        is_floored = log_min_p > float("-inf")
        least = tl.where(is_floored, tl.div_rn(top, temperature) + log_min_p, float("-inf"))
        all_above_least = tl.div_rn(to_float(lowest), temperature) < least
        enough = (top_k <= MAX_RANKED) | (lowest <= OF_MINUS_INF) | all_above_least
        holds = (log_min_p == float("-inf")) & (top_k >= vocab_size) & (held >= top_p * total)
        fits = is_complete & ((job == 0) | (num_found >= num_top))
        chosen = tl.full((), -1, tl.int32)
        if (fits & (enough | holds)) == 0:  # passes over the whole row decide what is kept
            edits = edits_of(
                flags | FLOORED, params_ptr, halves_ptr + row * num_words * 2,
                biases_ptr + row * 2 * MAX_BIASES, stop_ids_ptr + row * MAX_STOP_IDS,
                temperature, least, 0,
            )  # fmt: skip
            if (job == 0) & ((top_k >= vocab_size) | (top_p > 1.0)):
                chosen = choose_by_pivots(
                    row_ptr, vocab_size, top_k, top_p, top, scale, edits, key_1, key_2,
                    TILE, APPROXIMATE,
                )  # fmt: skip
            else:
                chosen, num_found = choose_exactly(
                    row_ptr, vocab_size, top_k.to(tl.int64), top_p, top, scale, edits, key_1, key_2,
                    row_values_ptr, row_ids_ptr, TILE, APPROXIMATE,
                )  # fmt: skip

        x, ids, rank, before = rank_candidates(row_values_ptr, row_ids_ptr, num_found, top, scale)
        there = tl.arange(0, SLOTS) < num_found
        if job == 0:
            keep = there & (rank < top_k) & (tl.div_rn(x, temperature) >= least)
            kept = tl.sum(tl.where(keep, weigh(x, top, scale), 0.0), axis=0)
            keep &= (before < top_p * tl.where(enough, kept, total)) | (rank == 0)
            scores = score_of(x, ids, scale, key_1, key_2, APPROXIMATE)
            scores = tl.where(keep, scores, float("-inf"))
            best = tl.max(scores, axis=0)
            answer = tl.min(tl.where(keep & (scores == best), ids, NONE), axis=0)
            answer = tl.where(chosen < 0, answer, chosen)
            answer = tl.where(answer == NONE, 0, answer)
            tl.store(out_ptr + entry, answer)
        else:
            store_logprobs(
                logprobs_ptr + entry * LOGPROBS, tl.load(row_ptr + answer), x, ids, rank,
                there & (rank < num_top), top, tl.log(total),
            )  # fmt: skip


@triton.jit
def best_of_splits(scores_ptr, ids_ptr, num_splits, PLAIN_SPLITS: tl.constexpr):
    """The best score and its id; of equal ones the lowest."""
    splits = tl.arange(0, PLAIN_SPLITS)
    mask = splits < num_splits
    scores = tl.load(scores_ptr + splits, mask=mask, other=float("-inf"))
    tokens = tl.load(ids_ptr + splits, mask=mask, other=NONE)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, NONE), axis=0)


@triton.jit
def gather_candidates(
    stats_ptr, values_ptr, ids_ptr, num_splits, scale, want, MAX_SPLITS: tl.constexpr
):
    """Join what the splits of a row left: SLOTS candidates at most, in the slots of split 0.

    Returns the row's largest logit, its sum, the key that all ids at or above it are candidates by,
    how many these are, and if none was left out.
    """
    splits = tl.arange(0, MAX_SPLITS)
    stats, there = stats_ptr + splits * NUM_STATS, splits < num_splits
    tops = tl.load(stats, mask=there, other=-0x800000).to(tl.float32, bitcast=True)
    sums = tl.load(stats + 1, mask=there, other=0).to(tl.float32, bitcast=True)
    floors = tl.load(stats + 2, mask=there, other=0).to(tl.uint32, bitcast=True)
    most = tl.max(tl.load(stats + 3, mask=there, other=0), axis=0)
    top = tl.max(tops, axis=0)
    total = tl.sum(sums * weigh(tops, top, scale), axis=0)
    floor = tl.max(floors, axis=0)
    lanes = tl.arange(0, MAX_SPLITS * SLOTS)
    split = lanes // SLOTS
    filled = tl.load(stats_ptr + split * NUM_STATS + 3, mask=split < num_splits, other=0)
    mask = lanes % SLOTS < filled
    value = tl.load(values_ptr + lanes, mask=mask, other=float("-inf"))
    token = tl.load(ids_ptr + lanes, mask=mask, other=NONE)
    key = tl.where(mask & (to_key(value) >= floor), to_key(value), 0)
    num_found = tl.sum((key > 0).to(tl.int32), axis=0)
    lowest = find_floor(key, floor, num_found, want, SLOTS)
    found = ((key >= lowest) & (key > 0)).to(tl.int32)
    num_found = tl.sum(found, axis=0)
    place = tl.cumsum(found, axis=0) - 1
    mask = (found != 0) & (place < SLOTS)
    tl.debug_barrier()  # the candidates to be ranked take the place of those of split 0
    tl.store(values_ptr + place, value, mask=mask)
    tl.store(ids_ptr + place, token, mask=mask)
    tl.debug_barrier()
    return top, total, lowest, num_found, (most <= SLOTS) & (num_found <= SLOTS)


@triton.jit
def weight_of_candidates(values_ptr, num_found, top, scale):
    """The sum of their weights."""
    ranks = tl.arange(0, SLOTS)
    mask = ranks < num_found
    x = tl.load(values_ptr + ranks, mask=mask, other=float("-inf"))
    return tl.sum(tl.where(mask, weigh(x, top, scale), 0.0), axis=0)


@triton.jit
def rank_candidates(values_ptr, ids_ptr, num_found, top, scale):
    """Logits, ids, ranks by logit and then by id, and the weight of those ahead, [SLOTS] each."""
    ranks = tl.arange(0, SLOTS)
    mask = ranks < num_found
    x = tl.load(values_ptr + ranks, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + ranks, mask=mask, other=NONE)
    rank = tl.zeros((SLOTS,), tl.int32)
    before = tl.zeros((SLOTS,), tl.float32)
    for start in range(0, tl.minimum(num_found, SLOTS), GROUP):
        others = start + tl.arange(0, GROUP)
        valid = others < num_found
        other_x = tl.load(values_ptr + others, mask=valid, other=float("-inf"))
        other_ids = tl.load(ids_ptr + others, mask=valid, other=NONE)
        is_ahead = (other_x[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
        is_ahead |= other_x[None, :] > x[:, None]
        rank += tl.sum(is_ahead.to(tl.int32), axis=1)
        other_weight = weigh(other_x, top, scale)
        before += tl.sum(tl.where(is_ahead, other_weight[None, :], 0.0), axis=1)
    return x, ids, rank, before


@triton.jit
def store_logprobs(out_ptr, logit, x, ids, rank, mask, top, log_total):
    """The log-probability of a token with this logit, then ids and theirs by rank."""
    logit = logit.to(tl.float32)
    logit = tl.where(logit != logit, float("-inf"), logit)
    tl.store(out_ptr, ((logit - top) - log_total).to(tl.int32, bitcast=True))
    pair_ptr = out_ptr + 1 + 2 * rank
    tl.store(pair_ptr, ids, mask=mask)
    tl.store(pair_ptr + 1, ((x - top) - log_total).to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def choose_by_pivots(
    row_ptr, vocab_size, top_k, top_p, top, scale, edits, key_1, key_2,
    TILE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """A row's token where it is cut by `top_k` or by `top_p`: the best score among the kept ids.

    The best of all ids is a draw of the whole distribution, so it is mostly kept. If it is not,
    neither is any id behind it, and the best of those ahead comes next: a few passes in all, as in
    sampling by rejection with pivots (FlashInfer, "Sorting-Free GPU Kernels for LLM Sampling",
    2025), but with the one noise of each id.
    """
    lanes = tl.arange(0, TILE)
    pivot = tl.full((), float("-inf"), tl.float32)
    pivot_id = tl.full((), 0x7FFFFFFF, tl.int32)
    mass = tl.full((), float("inf"), tl.float32)
    searching = pivot_id > 0
    while searching:
        best = tl.full((TILE,), float("-inf"), tl.float32)
        best_x = best
        best_ids = lanes
        counts = tl.zeros((TILE,), tl.int32)
        weights = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            ids = first + lanes
            x = read_edited(row_ptr, first, vocab_size, TILE, edits)
            ahead = (x > pivot) | ((x == pivot) & (ids < pivot_id))
            ahead = ahead & (ids < vocab_size)
            counts += ahead.to(tl.int32)
            weights += tl.where(ahead, weigh(x, top, scale), 0.0)
            scores = score_of(x, ids, scale, key_1, key_2, APPROXIMATE)
            better = ahead & (scores > best)
            best = tl.where(better, scores, best)
            best_x = tl.where(better, x, best_x)
            best_ids = tl.where(better, ids, best_ids)
        count = tl.sum(counts, axis=0)
        before = tl.sum(weights, axis=0)
        if pivot_id == 0x7FFFFFFF:  # all ids were ahead
            mass = before
            searching = before >= 0.0
        else:
            searching = (count > 0) & ((count >= top_k) | (before >= top_p * mass))
        if searching:
            score = tl.max(best, axis=0)
            pivot_id = tl.min(tl.where(best == score, best_ids, 0x7FFFFFFE), axis=0)
            pivot = tl.max(tl.where(best_ids == pivot_id, best_x, float("-inf")), axis=0)
    return pivot_id


@triton.jit
def choose_exactly(
    row_ptr, vocab_size, top_k, top_p, top, scale, edits, key_1, key_2, values_ptr, ids_ptr,
    TILE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """A row's token, cut wherever it is, and how many ids are kept; the slots get the first."""
    threshold, room = find_cut(
        row_ptr, vocab_size, top_k, top_p, scale, top, edits, TILE, read_edited
    )
    num_at = tl.full((), 0, tl.int64)
    num_kept = tl.full((), 0, tl.int32)
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = lanes
    for first in range(0, vocab_size, TILE):
        ids = first + lanes
        x = read_edited(row_ptr, first, vocab_size, TILE, edits)
        keep, num_at = keep_of_tile(x, threshold, room, num_at, first, vocab_size, TILE)
        keep &= ids < vocab_size
        scores = score_of(x, ids, scale, key_1, key_2, APPROXIMATE)
        better = keep & (scores > best)
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
        place = num_kept + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        mask = keep & (place < SLOTS)
        tl.store(values_ptr + place, x, mask=mask)
        tl.store(ids_ptr + place, ids, mask=mask)
        num_kept += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()
    score = tl.max(best, axis=0)
    return tl.min(tl.where(best == score, best_ids, NONE), axis=0), num_kept
