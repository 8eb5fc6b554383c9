"""The plan of a decode step: the batch cut into equal work, on the device.

A step's work is a flat list of items, one per (row, chunk of its context), rebuilt on the device
from the true lengths, so that a captured graph stays valid and ragged rows still balance.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

ITEM_FIELDS = tl.constexpr(7)
"""An item is (row, first token, end token, the row's first item, its number of items, first block).
The seventh field is not the item's: entry r of it is the first item of row r.

With a sliding window the tokens of a row's items are those that its query sees, and the first one
may lie within a tile; without, an item begins with a tile. The block saves every layer one of the
dependent loads with which a program begins; it is there where a block holds whole tiles.
"""
PLAN_LANES = tl.constexpr(512)
"""Items whose first blocks the plan looks up at a time."""
MOST_ROUNDS = tl.constexpr(128)
"""The plan weighs fewer rounds of merging than these. With a part and 60 tokens a round, 127 of
them are the best for 968,000 tokens, and more for longer rows only."""


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "max_len",
        "resident_items",
        "wave_items",
        "max_items",
        "min_chunk",
        "max_chunk",
    ],
)
def plan_kernel(
    seq_lens_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    table_stride,
    num_rows,
    max_len,
    resident_items,
    wave_items,
    max_items,
    min_chunk,
    max_chunk,
    item_capacity,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    SECOND_WAVE: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    ROUND_PARTS: tl.constexpr,
    ROUND_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """List the step's items: one program over all rows, of at most `max_len` tokens each.

    The chunk is the context per item that makes `wave_items` items, clamped to [min, max]_chunk,
    and raised where that would make more than `max_items` (+ 1 per row). The longest row bounds it
    too, by `quickest_chunk` with ROUND_PARTS and ROUND_TOKENS, if ROUND_PARTS is above 0. ONE_WAVE:
    where no more rows than `resident_items` have tokens, it is the shortest that makes at most so
    many items, for the programs of one more would begin when others have ended. SECOND_WAVE above
    0: the tokens that another start of a program costs; where rows are so unequal that half as many
    items more, of shorter chunks, end sooner all the same, there are as many. Chunks are whole
    tiles, and a row's chunks are of equal length. A WINDOW above 0 leaves out the tiles of which a
    row's query, the last of its tokens, sees nothing: they make no work and no item.

    Items are in the order of their rows; LONGEST_FIRST, and where there is a second wave, in that
    of the rows' lengths, for the last programs to begin are then the shortest, and end at about
    one time (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).

    DEPENDENT: it waits, and gives no signal of its own, for kernels behind it read the list before
    they wait. See `nanovllm_core.kernels.dependent_launch`.
    """
    if DEPENDENT:
        gdc_wait()
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    lens = tl.minimum(tl.maximum(lens, 0), max_len)
    if LONGEST_FIRST:
        rows, lens = longest_first(lens, BLOCK_ROWS)
    spans = lens - skipped_tokens(lens, WINDOW, TILE)
    total = tl.sum(spans, 0)
    chunk = tl.minimum(tl.maximum(tl.cdiv(total, wave_items), min_chunk), max_chunk)
    chunk = tl.maximum(chunk, tl.cdiv(total, max_items))
    if ROUND_PARTS > 0:
        longest = tl.max(spans, 0)
        min_chunk = quickest_chunk(longest, min_chunk, ROUND_PARTS, ROUND_TOKENS, TILE)
        chunk = tl.maximum(chunk, min_chunk)
    if ONE_WAVE:  # noqa: SIM102 - a constant, by which the rest is compiled or is not
        if tl.sum((spans > 0).to(tl.int32), 0) <= resident_items:
            chunk = shortest_chunk(spans, total, resident_items, min_chunk, TILE)
            if SECOND_WAVE > 0:
                more_items = resident_items + resident_items // 2
                shorter = shortest_chunk(spans, total, more_items, min_chunk, TILE)
                # A program's mean share, the part of a program by which the last ones end later,
                # and the start of a second one.
                if tl.cdiv(total, resident_items) + shorter // 2 + SECOND_WAVE < chunk:
                    chunk = shorter
                    rows, lens = longest_first(lens, BLOCK_ROWS)
    chunk = tl.cdiv(chunk, TILE) * TILE
    skipped = skipped_tokens(lens, WINDOW, TILE)
    spans = lens - skipped
    counts = tl.cdiv(spans, chunk)
    # Even out: 600 tokens in chunks of 576 are 320 + 280, not 576 + 24.
    size = tl.cdiv(tl.cdiv(spans, tl.maximum(counts, 1)), TILE) * TILE
    size = tl.maximum(size, TILE)
    # A padded row keeps one item of no tokens, which writes zeros.
    counts = tl.where(rows < num_rows, tl.maximum(tl.cdiv(spans, size), 1), 0)
    first = tl.cumsum(counts, 0) - counts
    tl.store(items_ptr + 6 * item_capacity + rows, first, mask=rows < num_rows)
    for index in range(0, tl.max(counts, 0)):
        here = index < counts
        begin = index * size
        end = begin + size
        if WINDOW > 0:
            begin = tl.maximum(begin + skipped, lens - WINDOW)
            end = end + skipped
        item = items_ptr + first + index
        tl.store(item, rows, mask=here)
        tl.store(item + item_capacity, begin, mask=here)
        tl.store(item + 2 * item_capacity, tl.minimum(end, lens), mask=here)
        tl.store(item + 3 * item_capacity, first, mask=here)
        tl.store(item + 4 * item_capacity, counts, mask=here)
    num_items = tl.sum(counts, 0)
    if BLOCK_SIZE % TILE == 0:
        look_up_blocks(table_ptr, items_ptr, table_stride, item_capacity, num_items, BLOCK_SIZE)
    # Released behind all other stores: some runs read the items without waiting for this kernel's
    # end to be visible.
    tl.debug_barrier()
    tl.atomic_xchg(num_items_ptr, num_items, sem="release", scope="gpu")


@triton.jit
def skipped_tokens(lens, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The tokens before the tile in which each row's window begins."""
    skipped = tl.zeros_like(lens)
    if WINDOW > 0:
        skipped = tl.maximum(lens - WINDOW, 0) // TILE * TILE
    return skipped


@triton.jit
def longest_first(lens, BLOCK_ROWS: tl.constexpr):
    """The rows and their lengths, the longest first and of equal ones the earlier."""
    keys = lens.to(tl.int64) * BLOCK_ROWS + (BLOCK_ROWS - 1 - tl.arange(0, BLOCK_ROWS))
    keys = tl.sort(keys, descending=True)
    rows = BLOCK_ROWS - 1 - keys % BLOCK_ROWS
    return rows.to(tl.int32), (keys // BLOCK_ROWS).to(tl.int32)


@triton.jit
def quickest_chunk(
    span, min_chunk, ROUND_PARTS: tl.constexpr, ROUND_TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """The chunk, `min_chunk` at least, with which a row of `span` tokens is attended soonest.

    Its chunks are attended side by side; then the last program merges ROUND_PARTS of them in each
    round, in the time of ROUND_TOKENS tokens of a chunk. So rounds are filled: a row that is not
    cut, and chunks that make one full round, two, and so on, are weighed.
    """
    rounds = tl.arange(0, MOST_ROUNDS)
    chunks = tl.cdiv(span, tl.maximum(rounds * ROUND_PARTS, 1))
    chunks = tl.maximum(tl.cdiv(tl.maximum(chunks, min_chunk), TILE) * TILE, TILE)
    parts = tl.cdiv(span, chunks)
    taken = tl.where(parts > 1, tl.cdiv(parts, ROUND_PARTS), 0)
    times = chunks + taken * ROUND_TOKENS
    return tl.max(tl.where(times == tl.min(times, 0), chunks, 0), 0)


@triton.jit
def shortest_chunk(spans, total, num_items, min_chunk, TILE: tl.constexpr):
    """The shortest chunk, in whole tiles, that cuts the rows into at most `num_items` items.

    No more rows than that have tokens, so a chunk as long as the longest of them is one that does;
    the shortest is found by halving. Rows without tokens do not count: their programs end at once.
    """
    low = tl.cdiv(tl.maximum(tl.cdiv(total, num_items), min_chunk), TILE)
    high = tl.maximum(tl.cdiv(tl.max(spans, 0), TILE), low)
    while low < high:
        middle = (low + high) // 2
        if tl.sum(tl.cdiv(spans, middle * TILE), 0) <= num_items:
            high = middle
        else:
            low = middle + 1
    return low * TILE


@triton.jit
def look_up_blocks(
    table_ptr, items_ptr, table_stride, item_capacity, num_items, BLOCK_SIZE: tl.constexpr
):
    """Store the first block of every item.

    One look-up for all: in the loop over a row's items every round would wait for its own.
    """
    tl.debug_barrier()
    for base in range(0, num_items, PLAN_LANES):
        slots = base + tl.arange(0, PLAN_LANES)
        item = items_ptr + slots
        here = slots < num_items
        row = tl.load(item, mask=here, other=0).to(tl.int64)
        begin = tl.load(item + item_capacity, mask=here, other=0)
        end = tl.load(item + 2 * item_capacity, mask=here, other=0)
        block_id = tl.load(table_ptr + row * table_stride + begin // BLOCK_SIZE, mask=begin < end)
        tl.store(item + 5 * item_capacity, block_id, mask=begin < end)
