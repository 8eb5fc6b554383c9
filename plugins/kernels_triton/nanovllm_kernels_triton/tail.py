"""The captured tail's kernels: a row's own parameters between its logits and its token.

`nanovllm_core.worker.sampler_tail` is the definition. The choice, its noise and its ties are those
of the core's sampler, whose kernel samples the rows that ask for nothing; the programs here end at
once for these.

The first kernel reads one split of a row. Where the row is not cut it scores each id, as the
sampler does. Where it is, and where log-probabilities are asked for, it leaves the split's largest
logit, its sum of probabilities, and its candidates: the ids at or above a floor that enough of them
reach. Enough are `top_k`, or MAX_RANKED; the floor is found by bisecting the largest logit of each
lane, and the lanes above it are read again. All ids above the highest floor of a row are then among
its candidates.

The second kernel, a program per row, raises that floor until at most SLOTS candidates are left, and
ranks these by comparing all pairs. Where they cannot say what is kept (`top_k` above `MAX_RANKED`,
a `top_p` that they do not hold, ties beyond all slots) it passes over the whole row.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_core.api import (
    MAX_DEVICE_STOP_IDS,
    MAX_ROW_LOGPROBS,
    NUM_ROW_COLUMNS,
    RowColumn,
    RowFlag,
)
from nanovllm_core.kernels.device_functions import (
    find_cut,
    keep_of_tile,
    noise_keys,
    score_of,
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
    count_known,
    edits_of,
    load_float,
    read_edited,
    read_some,
)

TOP_K = tl.constexpr(int(RowColumn.TOP_K))
TOP_P = tl.constexpr(int(RowColumn.TOP_P))
LOG_MIN_P = tl.constexpr(int(RowColumn.LOG_MIN_P))
NUM_TOP = tl.constexpr(int(RowColumn.NUM_TOP))
NUM_COLUMNS = tl.constexpr(NUM_ROW_COLUMNS)
MAX_TOP = tl.constexpr(MAX_ROW_LOGPROBS)
MAX_STOP_IDS = tl.constexpr(MAX_DEVICE_STOP_IDS)
CUT = tl.constexpr(int(RowFlag.CUT))

SLOTS = tl.constexpr(128)
"""The candidates that a split leaves, and those of a row that are ranked."""
MAX_RANKED = tl.constexpr(64)
"""The largest `top_k` that is cut by ranking."""
GROUP = tl.constexpr(32)
"""Candidates are compared with so many at once."""
NUM_STATS = tl.constexpr(4)
"""Of each split: its largest logit, its sum, its floor, its number of candidates."""
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(0x7FFFFFFF)
"""Above every id."""
OF_MINUS_INF = tl.constexpr(0x007FFFFF)
"""`to_key(-inf)`."""


@triton.jit
def find_floor(keys, low, count, want, most):
    """A key that `want` to `most` of these reach, or else the largest that `want` reach.

    `low`, which `count` of them reach, where these are too few.
    """
    high = tl.max(keys, axis=0)
    count += tl.zeros((), tl.int32)  # the loop changes it, so it is no constant
    while (count > most) & (low < high):
        middle = high - ((high - low) >> 1)
        reach = tl.sum((keys >= middle).to(tl.int32), axis=0)
        if reach >= want:
            low = middle
            count = reach
        else:
            high = middle - 1
    return low


# One variant for every batch size: a graph's capture must not meet one that is not compiled yet.
@triton.jit(do_not_specialize=["num_tiles", "max_entries", "max_model_len"])
def tail_partial_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, biases_ptr, stop_ids_ptr, min_tokens_ptr, halves_ptr,
    scores_ptr, score_ids_ptr, stats_ptr, values_ptr, ids_ptr,
    num_prompt_ptr, token_ids_ptr, words_ptr,
    vocab_size, num_tiles, num_words, max_entries, max_model_len,
    TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, PLAIN_SPLITS: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One program for each entry and split: what its token needs, then its log-probabilities."""
    entry, split = tl.program_id(0), tl.program_id(1)
    if tl.load(skip_ptr) != 0:
        return
    row = tl.load(rows_ptr + entry)
    if row < 0:
        return
    row = row.to(tl.int64)
    params_ptr += row * NUM_COLUMNS
    asked = tl.load(params_ptr + FLAGS)
    num_top = tl.load(params_ptr + NUM_TOP)
    if (asked == 0) & (num_top < 0):
        return

    index = tl.load(output_index_ptr + entry)
    first = split * num_tiles * TILE
    row_ptr = logits_ptr + entry.to(tl.int64) * vocab_size
    temperature = tl.load(temperature_ptr + row)
    scale = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature)) * LOG2_E
    flags = tl.where(index < tl.load(min_tokens_ptr + row), asked, asked & ~FORBIDS)
    edits = edits_of(
        flags, params_ptr, halves_ptr + row * num_words * 2, biases_ptr + row * 2 * MAX_BIASES,
        stop_ids_ptr + row * MAX_STOP_IDS, temperature, 0.0,
    )  # fmt: skip
    if flags & PENALISED:
        count_known(
            words_ptr + row * num_words, token_ids_ptr + row * max_model_len,
            tl.load(params_ptr + COUNTED), tl.load(num_known_ptr + entry),
            tl.load(num_prompt_ptr + row), first,
            tl.minimum(first + num_tiles * TILE, 2 * num_words),
        )  # fmt: skip

    if (asked != 0) & ((asked & CUT) == 0):
        lanes = tl.arange(0, TILE)
        key_1, key_2 = noise_keys(seed_ptr, row, index)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        best_ids = first + lanes
        for tile in range(num_tiles):
            start = first + tile * TILE
            scores = read_edited(row_ptr, start, vocab_size, TILE, edits)
            if temperature != 0.0:
                scores = score_of(scores, start + lanes, scale, key_1, key_2, APPROXIMATE)
            better = scores > best
            best = tl.where(better, scores, best)
            best_ids = tl.where(better, start + lanes, best_ids)
        score = tl.max(best, axis=0)
        slot = entry * PLAIN_SPLITS + split
        tl.store(scores_ptr + slot, score)
        tl.store(score_ids_ptr + slot, tl.min(tl.where(best == score, best_ids, NONE), axis=0))

    top_k = tl.load(params_ptr + TOP_K)
    for job in range(tl.where((asked & CUT) == 0, 1, 0), tl.where(num_top < 0, 1, 2)):
        if job == 1:  # of the logits as they are
            flags *= 0
            scale = scale * 0.0 + LOG2_E
            top_k = tl.maximum(num_top, 1)
        edits = edits_of(
            flags, params_ptr, halves_ptr + row * num_words * 2,
            biases_ptr + row * 2 * MAX_BIASES, stop_ids_ptr + row * MAX_STOP_IDS,
            temperature, 0.0,
        )  # fmt: skip
        slots = (job * max_entries + entry).to(tl.int64) * MAX_SPLITS + split
        find_candidates(
            row_ptr, first, num_tiles, vocab_size, edits, scale,
            tl.minimum(top_k, MAX_RANKED), (job == 1) | (top_k > MAX_RANKED),
            stats_ptr + slots * NUM_STATS, values_ptr + slots * SLOTS, ids_ptr + slots * SLOTS,
            TILE,
        )  # fmt: skip


@triton.jit
def find_candidates(
    row_ptr, first, num_tiles, vocab_size, edits, scale, want, is_summed,
    stats_ptr, values_ptr, ids_ptr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a split's candidates, at least `want`, and its stats. Each lane has one id per tile.

    The sum is right where it `is_summed`: the likeliest few ids need none.
    """
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    weights = tl.zeros((TILE,), tl.float32)
    for tile in range(num_tiles):
        x = read_edited(row_ptr, first + tile * TILE, vocab_size, TILE, edits)
        new = tl.maximum(best, x)
        if is_summed:
            weights = weights * weigh(best, new, scale) + weigh(x, new, scale)
        best = new
    top = tl.max(best, axis=0)
    keys = to_key(best)
    # Fewer than the slots, since a lane may have several ids above the floor.
    floor = find_floor(keys, tl.min(keys, axis=0), TILE, want, SLOTS - SLOTS // 4)
    found = ((keys >= floor) & (best > float("-inf"))).to(tl.int32)
    num_lanes = tl.sum(found, axis=0)
    place = tl.cumsum(found, axis=0) - 1
    tl.store(ids_ptr + place, lanes, mask=(found != 0) & (place < SLOTS))
    tl.debug_barrier()
    slots = tl.arange(0, SLOTS)
    valid = slots < num_lanes
    found_lanes = tl.load(ids_ptr + slots, mask=valid, other=0)
    tl.debug_barrier()  # the candidates take the place of their lanes
    count = tl.full((), 0, tl.int32)
    for tile in range(num_tiles):
        start = first + tile * TILE
        ids = start + found_lanes
        x = read_some(row_ptr, ids, start, vocab_size, TILE, edits)
        here = (valid & (to_key(x) >= floor) & (x > float("-inf"))).to(tl.int32)
        slot = count + tl.cumsum(here, axis=0) - 1
        mask = (here != 0) & (slot < SLOTS)
        tl.store(values_ptr + slot, x, mask=mask)
        tl.store(ids_ptr + slot, ids, mask=mask)
        count += tl.sum(here, axis=0)
    tl.store(stats_ptr, top.to(tl.int32, bitcast=True))
    total = tl.sum(weights * weigh(best, top, scale), axis=0)
    tl.store(stats_ptr + 1, total.to(tl.int32, bitcast=True))
    tl.store(stats_ptr + 2, floor.to(tl.int32, bitcast=True))
    tl.store(stats_ptr + 3, tl.maximum(count, num_lanes))


@triton.jit(do_not_specialize=["num_splits", "plain_splits", "max_entries"])
def tail_merge_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, biases_ptr, stop_ids_ptr, min_tokens_ptr, halves_ptr,
    scores_ptr, score_ids_ptr, stats_ptr, values_ptr, ids_ptr,
    out_ptr, token_logprob_ptr, top_logprobs_ptr, top_ids_ptr,
    vocab_size, num_splits, plain_splits, num_words, max_entries,
    TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, PLAIN_SPLITS: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One program for each entry: its token, then its log-probabilities."""
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
        splits = tl.arange(0, PLAIN_SPLITS)
        mask = splits < tl.where(asked == 0, plain_splits, num_splits)
        at = entry * PLAIN_SPLITS + splits
        scores = tl.load(scores_ptr + at, mask=mask, other=float("-inf"))
        tokens = tl.load(score_ids_ptr + at, mask=mask, other=NONE)
        best = tl.max(scores, axis=0)
        answer = tl.min(tl.where(scores == best, tokens, NONE), axis=0)
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

        # What the splits left: the row's top, its sum, and the candidates above the highest floor.
        slots = (job * max_entries + entry).to(tl.int64) * MAX_SPLITS
        row_values_ptr, row_ids_ptr = values_ptr + slots * SLOTS, ids_ptr + slots * SLOTS
        row_stats_ptr = stats_ptr + slots * NUM_STATS
        splits = tl.arange(0, MAX_SPLITS)
        stats, there = row_stats_ptr + splits * NUM_STATS, splits < num_splits
        tops = tl.load(stats, mask=there, other=-0x800000).to(tl.float32, bitcast=True)
        sums = tl.load(stats + 1, mask=there, other=0).to(tl.float32, bitcast=True)
        floors = tl.load(stats + 2, mask=there, other=0).to(tl.uint32, bitcast=True)
        most = tl.max(tl.load(stats + 3, mask=there, other=0), axis=0)
        top = tl.max(tops, axis=0)
        total = tl.sum(sums * weigh(tops, top, scale), axis=0)
        floor = tl.max(floors, axis=0)
        lanes = tl.arange(0, MAX_SPLITS * SLOTS)
        split = lanes // SLOTS
        filled = tl.load(row_stats_ptr + split * NUM_STATS + 3, mask=split < num_splits, other=0)
        mask = lanes % SLOTS < filled
        value = tl.load(row_values_ptr + lanes, mask=mask, other=float("-inf"))
        token = tl.load(row_ids_ptr + lanes, mask=mask, other=NONE)
        key = tl.where(mask & (to_key(value) >= floor), to_key(value), 0)
        num_found = tl.sum((key > 0).to(tl.int32), axis=0)
        lowest = find_floor(key, floor, num_found, tl.minimum(top_k, MAX_RANKED), SLOTS)
        found = ((key >= lowest) & (key > 0)).to(tl.int32)
        num_found = tl.sum(found, axis=0)
        place = tl.cumsum(found, axis=0) - 1
        mask = (found != 0) & (place < SLOTS)
        tl.debug_barrier()  # the candidates to be ranked take the place of those of split 0
        tl.store(row_values_ptr + place, value, mask=mask)
        tl.store(row_ids_ptr + place, token, mask=mask)
        tl.debug_barrier()

        # Where they do not decide what is kept, passes over the whole row do.
        ranks = tl.arange(0, SLOTS)
        mask = ranks < num_found
        x = tl.load(row_values_ptr + ranks, mask=mask, other=float("-inf"))
        held = tl.sum(tl.where(mask, weigh(x, top, scale), 0.0), axis=0)
        # Without a min_p, none: a top of +inf would make it NaN.
        is_floored = log_min_p > float("-inf")
        least = tl.where(is_floored, tl.div_rn(top, temperature) + log_min_p, float("-inf"))
        all_above_least = tl.div_rn(to_float(lowest), temperature) < least
        enough = (top_k <= MAX_RANKED) | (lowest <= OF_MINUS_INF) | all_above_least
        holds = (log_min_p == float("-inf")) & (top_k >= vocab_size) & (held >= top_p * total)
        fits = (most <= SLOTS) & (num_found <= SLOTS) & ((job == 0) | (num_found >= num_top))
        chosen = tl.full((), -1, tl.int32)
        if (fits & (enough | holds)) == 0:
            edits = edits_of(
                flags | FLOORED, params_ptr, halves_ptr + row * num_words * 2,
                biases_ptr + row * 2 * MAX_BIASES, stop_ids_ptr + row * MAX_STOP_IDS,
                temperature, least,
            )  # fmt: skip
            if (job == 0) & ((top_k >= vocab_size) | (top_p > 1.0)):
                chosen = choose_by_pivots(
                    row_ptr, vocab_size, top_k, top_p, top, scale, edits, key_1, key_2,
                    TILE, APPROXIMATE,
                )  # fmt: skip
            else:
                chosen, num_found = choose_exactly(
                    row_ptr, vocab_size, top_k.to(tl.int64), top_p, scale, edits, key_1, key_2,
                    row_values_ptr, row_ids_ptr, TILE, APPROXIMATE,
                )  # fmt: skip

        # Ranked by logit and then by id; `before` is the weight of those ahead.
        mask = ranks < num_found
        x = tl.load(row_values_ptr + ranks, mask=mask, other=float("-inf"))
        ids = tl.load(row_ids_ptr + ranks, mask=mask, other=NONE)
        rank = tl.zeros((SLOTS,), tl.int32)
        before = tl.zeros((SLOTS,), tl.float32)
        for start in range(0, tl.minimum(num_found, SLOTS), GROUP):
            others = start + tl.arange(0, GROUP)
            valid = others < num_found
            other_x = tl.load(row_values_ptr + others, mask=valid, other=float("-inf"))
            other_ids = tl.load(row_ids_ptr + others, mask=valid, other=NONE)
            is_ahead = (other_x[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
            is_ahead |= other_x[None, :] > x[:, None]
            rank += tl.sum(is_ahead.to(tl.int32), axis=1)
            other_weight = weigh(other_x, top, scale)
            before += tl.sum(tl.where(is_ahead, other_weight[None, :], 0.0), axis=1)
        if job == 0:
            keep = mask & (rank < top_k) & (tl.div_rn(x, temperature) >= least)
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
            logit = tl.load(row_ptr + answer).to(tl.float32)
            logit = tl.where(logit != logit, float("-inf"), logit)
            log_total = tl.log(total)
            tl.store(token_logprob_ptr + entry, (logit - top) - log_total)
            mask &= rank < num_top
            at = entry * MAX_TOP + rank
            tl.store(top_logprobs_ptr + at, (x - top) - log_total, mask=mask)
            tl.store(top_ids_ptr + at, ids, mask=mask)


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
    row_ptr, vocab_size, top_k, top_p, scale, edits, key_1, key_2, values_ptr, ids_ptr,
    TILE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """A row's token, cut wherever it is, and how many ids are kept; the slots get the first."""
    threshold, room = find_cut(row_ptr, vocab_size, top_k, top_p, scale, edits, TILE, read_edited)
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
