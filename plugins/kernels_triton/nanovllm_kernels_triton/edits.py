"""Logit bias, penalties and forbidden ids in Triton, applied to logits as they are read.

What a row asks is a tuple, as `edits_of` makes it: nothing is
written back, so every pass over a row may read it anew, and no copy of the logits exists.

Penalties need to know how often each id came before. The count table has 16 bits for each row and
id: the highest says whether the id is in the prompt, the others count it in the output, up to
`MOST`. A program brings its own part of the vocabulary up to date before it reads it, by the ids
that became known since the row was last counted: in a steady step, one.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_core.api import MAX_ROW_BIASES, RowColumn, RowFlag

FLAGS = tl.constexpr(int(RowColumn.FLAGS))
REPETITION = tl.constexpr(int(RowColumn.REPETITION))
PRESENCE = tl.constexpr(int(RowColumn.PRESENCE))
FREQUENCY = tl.constexpr(int(RowColumn.FREQUENCY))
NUM_BIASES = tl.constexpr(int(RowColumn.NUM_BIASES))
COUNTED = tl.constexpr(int(RowColumn.COUNTED))
PENALISED = tl.constexpr(int(RowFlag.PENALISED))
BIASED = tl.constexpr(int(RowFlag.BIASED))
FORBIDS = tl.constexpr(int(RowFlag.FORBIDS))
FLOORED = tl.constexpr(2 * max(RowFlag))
"""Set here only: ids below a floor (min_p) are forbidden."""
MAX_BIASES = tl.constexpr(MAX_ROW_BIASES)

NUM_STOP_IDS = tl.constexpr(int(RowColumn.NUM_STOP_IDS))
IN_PROMPT = tl.constexpr(0x8000)
CHUNK = tl.constexpr(1024)
MOST = tl.constexpr(0x8000 - 2 * 1024)
"""A count stops here. Lanes of one chunk may pass it together, but never reach the prompt's bit."""


@triton.jit
def load_float(pointer):
    """A float that is stored by its bits."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def edits_of(
    flags, params_ptr, halves_ptr, biases_ptr, stop_ids_ptr, temperature, lowest, first_id
):
    """What `read_edited` does to a row: pointers are the row's own, `flags` say what counts.

    Ids are forbidden whose logit divided by `temperature` is below `lowest`, where FLOORED. Logits
    and counts begin at `first_id`, which is above 0 where ranks share the vocabulary.
    """
    return (
        flags,
        halves_ptr,
        biases_ptr,
        tl.load(params_ptr + NUM_BIASES),
        stop_ids_ptr,
        load_float(params_ptr + REPETITION),
        load_float(params_ptr + PRESENCE),
        load_float(params_ptr + FREQUENCY),
        tl.load(params_ptr + NUM_STOP_IDS),
        temperature,
        lowest,
        first_id,
    )


@triton.jit
def read_edited(row_ptr, first, vocab_size, TILE: tl.constexpr, edits):
    """The logits of ids `first` to `first + TILE - 1` as float32, edited; -inf beyond the end."""
    return read_some(row_ptr, first + tl.arange(0, TILE), first, vocab_size, TILE, edits)


@triton.jit
def read_columns(row_ptr, first, num_ids, TILE: tl.constexpr, edits):
    """The same by columns, of which the first `num_ids` are ids."""
    first_id = edits[11]
    return read_edited(row_ptr, first_id + first, first_id + num_ids, TILE, edits)


@triton.jit
def read_some(row_ptr, ids, first, vocab_size, TILE: tl.constexpr, edits):
    """The same of any ids among these."""
    columns = ids - edits[11]
    x = tl.load(row_ptr + columns, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    flags = edits[0]
    if flags & BIASED:
        slots = tl.arange(0, MAX_BIASES)
        biased = tl.load(edits[2] + slots, mask=slots < edits[3], other=0x7FFFFFFF)
        begin = tl.sum((biased < first).to(tl.int32), axis=0)
        end = tl.sum((biased < first + TILE).to(tl.int32), axis=0)
        for i in range(begin, end):
            bias = load_float(edits[2] + MAX_BIASES + i)
            x += tl.where(ids == tl.load(edits[2] + i), bias, 0.0)
    if flags & PENALISED:
        counts = tl.load(edits[1] + columns, mask=ids < vocab_size, other=0).to(tl.int32)
        outputs = counts & 0x7FFF
        factor = tl.where(x > 0, tl.div_rn(1.0, edits[5]), edits[5])
        x = tl.where(counts != 0, x * factor, x)
        x -= edits[7] * outputs.to(tl.float32)
        x -= tl.where(outputs > 0, edits[6], 0.0)
    if flags & FORBIDS:
        for i in range(edits[8]):
            x = tl.where(ids == tl.load(edits[4] + i), float("-inf"), x)
    if flags & FLOORED:
        x = tl.where(tl.div_rn(x, edits[9]) < edits[10], float("-inf"), x)
    return x


@triton.jit
def count_known(words_ptr, token_ids_ptr, counted, known, num_prompt, first, end, first_id):
    """Count a row's tokens `counted` to `known - 1` whose columns are `first` to `end - 1`.

    Both are even; column 0 is `first_id`. `words_ptr` is the row's part of the count table, two
    columns in a word.
    """
    lanes = tl.arange(0, CHUNK)
    if counted < 0:
        for word in range(first // 2, end // 2, CHUNK):
            tl.store(words_ptr + word + lanes, 0, mask=word + lanes < end // 2)
        tl.debug_barrier()
    for start in range(tl.maximum(counted, 0), known, CHUNK):
        at = start + lanes
        token = tl.load(token_ids_ptr + at, mask=at < known, other=-1) - first_id
        mine = (token >= first) & (token < end)
        shift = (token & 1) * 16
        word_ptr = words_ptr + (token >> 1)
        count = (tl.load(word_ptr, mask=mine, other=0) >> shift) & 0x7FFF
        one = tl.full((CHUNK,), 1, tl.int32) << shift
        tl.atomic_or(word_ptr, one * IN_PROMPT, mask=mine & (at < num_prompt), sem="relaxed")
        more = mine & (at >= num_prompt) & (count < MOST)
        tl.atomic_add(word_ptr, one, mask=more, sem="relaxed")
        tl.debug_barrier()
