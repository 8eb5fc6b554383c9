"""The captured tail's first kernel: a row's own parameters between its logits and its token.

`nanovllm_core.worker.sampler_tail` is the definition. The choice, its noise and its ties are those
of the core's sampler, whose kernel samples the rows that ask for nothing; the programs of both
kernels end at once for these.

It reads one split of a row. Where the row is not cut it scores each id, as the
sampler does. Where it is, and where log-probabilities are asked for, it leaves the split's largest
logit, its sum of probabilities, and its candidates: the ids at or above a floor that enough of them
reach. Enough are `top_k`, or MAX_RANKED; the floor is found by bisecting the largest logit of each
lane, and the lanes above it are read again. All ids above the highest floor of a row are then among
its candidates.

`tail_merge` has the second kernel.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_core.api import (
    MAX_DEVICE_STOP_IDS,
    NUM_ROW_COLUMNS,
    RowColumn,
    RowFlag,
)
from nanovllm_core.kernels.device_functions import (
    noise_keys,
    score_of,
    take_turn,
    to_key,
    weigh,
)
from nanovllm_kernels_triton.edits import (
    COUNTED,
    FLAGS,
    FORBIDS,
    MAX_BIASES,
    PENALISED,
    count_known,
    edits_of,
    read_edited,
    read_some,
)

TOP_K = tl.constexpr(int(RowColumn.TOP_K))
NUM_TOP = tl.constexpr(int(RowColumn.NUM_TOP))
NUM_COLUMNS = tl.constexpr(NUM_ROW_COLUMNS)
MAX_STOP_IDS = tl.constexpr(MAX_DEVICE_STOP_IDS)
CUT = tl.constexpr(int(RowFlag.CUT))

SLOTS = tl.constexpr(128)
"""The candidates that a split leaves, and those of a row that are ranked."""
MAX_RANKED = tl.constexpr(64)
"""The largest `top_k` that is cut by ranking."""
NUM_STATS = tl.constexpr(4)
"""Of each split: its largest logit, its sum, its floor, its number of candidates."""
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(0x7FFFFFFF)
"""Above every id."""


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
@triton.jit(do_not_specialize=["num_tiles", "max_entries", "max_model_len", "max_top_k"])
def tail_partial_kernel(
    logits_ptr, rows_ptr, temperature_ptr, seed_ptr, output_index_ptr, num_known_ptr, skip_ptr,
    params_ptr, biases_ptr, stop_ids_ptr, min_tokens_ptr, halves_ptr,
    scores_ptr, score_ids_ptr, stats_ptr, values_ptr, ids_ptr,
    num_prompt_ptr, token_ids_ptr, words_ptr,
    num_columns, num_ids, num_tiles, num_words, max_entries, max_model_len, max_top_k,
    FIRST_ID: tl.constexpr, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PLAIN_SPLITS: tl.constexpr, APPROXIMATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for each entry and split: what its token needs, then its log-probabilities.

    Logits have `num_columns`: the `num_ids` ids from FIRST_ID on, then padding. Rows that are cut
    by a larger top_k than `max_top_k` are left out. DEPENDENT: see `take_turn`.
    """
    take_turn(DEPENDENT)
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
    top_k = tl.load(params_ptr + TOP_K)
    if ((asked & CUT) != 0) & (top_k > max_top_k):
        return

    index = tl.load(output_index_ptr + entry)
    first_column = split * num_tiles * TILE
    first, end = FIRST_ID + first_column, FIRST_ID + num_ids
    row_ptr = logits_ptr + entry.to(tl.int64) * num_columns
    temperature = tl.load(temperature_ptr + row)
    scale = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature)) * LOG2_E
    flags = tl.where(index < tl.load(min_tokens_ptr + row), asked, asked & ~FORBIDS)
    edits = edits_of(
        flags, params_ptr, halves_ptr + row * num_words * 2, biases_ptr + row * 2 * MAX_BIASES,
        stop_ids_ptr + row * MAX_STOP_IDS, temperature, 0.0, FIRST_ID,
    )  # fmt: skip
    if flags & PENALISED:
        count_known(
            words_ptr + row * num_words, token_ids_ptr + row * max_model_len,
            tl.load(params_ptr + COUNTED), tl.load(num_known_ptr + entry),
            tl.load(num_prompt_ptr + row), first_column,
            tl.minimum(first_column + num_tiles * TILE, 2 * num_words), FIRST_ID,
        )  # fmt: skip

    if (asked != 0) & ((asked & CUT) == 0):
        lanes = tl.arange(0, TILE)
        key_1, key_2 = noise_keys(seed_ptr, row, index)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        best_ids = first + lanes
        for tile in range(num_tiles):
            start = first + tile * TILE
            scores = read_edited(row_ptr, start, end, TILE, edits)
            if temperature != 0.0:
                scores = score_of(scores, start + lanes, scale, key_1, key_2, APPROXIMATE)
            better = scores > best
            best = tl.where(better, scores, best)
            best_ids = tl.where(better, start + lanes, best_ids)
        score = tl.max(best, axis=0)
        slot = entry * PLAIN_SPLITS + split
        tl.store(scores_ptr + slot, score)
        tl.store(score_ids_ptr + slot, tl.min(tl.where(best == score, best_ids, NONE), axis=0))

    for job in range(tl.where((asked & CUT) == 0, 1, 0), tl.where(num_top < 0, 1, 2)):
        if job == 1:  # of the logits as they are
            flags *= 0
            scale = scale * 0.0 + LOG2_E
            top_k = tl.maximum(num_top, 1)
        edits = edits_of(
            flags, params_ptr, halves_ptr + row * num_words * 2,
            biases_ptr + row * 2 * MAX_BIASES, stop_ids_ptr + row * MAX_STOP_IDS,
            temperature, 0.0, FIRST_ID,
        )  # fmt: skip
        slots = (job * max_entries + entry).to(tl.int64) * MAX_SPLITS + split
        find_candidates(
            row_ptr, first, num_tiles, end, edits, scale,
            tl.minimum(top_k, MAX_RANKED), (job == 1) | (top_k > MAX_RANKED),
            stats_ptr + slots * NUM_STATS, values_ptr + slots * SLOTS, ids_ptr + slots * SLOTS,
            TILE,
        )  # fmt: skip


@triton.jit
def find_candidates(
    row_ptr, first, num_tiles, end, edits, scale, want, is_summed,
    stats_ptr, values_ptr, ids_ptr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a split's candidates, at least `want`, and its stats. Each lane has one id per tile.

    The sum is right where it `is_summed`: the likeliest few ids need none.
    """
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    weights = tl.zeros((TILE,), tl.float32)
    for tile in range(num_tiles):
        x = read_edited(row_ptr, first + tile * TILE, end, TILE, edits)
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
        x = read_some(row_ptr, ids, start, end, TILE, edits)
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
