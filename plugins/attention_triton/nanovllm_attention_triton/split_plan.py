"""The plan of a step with few rows of prompts: which contexts are split, on the device.

Where the row blocks of a step are fewer than the programs that a GPU runs side by side, several
programs attend one block, each to a part of its keys ("split KV"). The plan lists the items, one
per (row block, split), from the true lengths, so that a captured graph stays valid.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(8)
"""An item is (sequence, its first query, its number of queries and of keys, the block's first row,
split, the block's number of splits). The eighth field is not the item's: entry b of it is the first
item of row block b."""
MOST_SPLITS = tl.constexpr(64)
"""Of a row block."""
MOST_WAVES = tl.constexpr(4)
"""Times that the programs of split blocks fill the GPU, at most. Beyond, uneven ends count for
little."""
PAIRED = tl.constexpr(0.8)
"""The time of two programs that share a multiprocessor, of that of one after the other."""
PLAN_LANES = tl.constexpr(128)
"""Items of a sequence that are listed at a time."""


@triton.jit(do_not_specialize=["num_seqs", "num_multiprocessors", "num_kv_heads"])
def plan_splits_kernel(
    seq_lens_ptr,
    query_start_ptr,
    items_ptr,
    num_items_ptr,
    num_seqs,
    num_multiprocessors,
    num_kv_heads,
    item_capacity,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    RESIDENT: tl.constexpr,
    START_TILES: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    MERGE_TILES: tl.constexpr,
):
    """List the items of one sequence. Grid: the sequences; each program plans for all of them.

    WINDOW above 0: the keys that a query sees. A sequence's last rows, which see the most keys, are
    its first block. Items beyond the capacity are counted and not listed: such a step is not
    attended by items.
    """
    mine = tl.program_id(0)
    seqs = tl.arange(0, BLOCK_SEQS)
    here = seqs < num_seqs
    starts = tl.load(query_start_ptr + seqs, mask=here, other=0)
    query_lens = tl.load(query_start_ptr + 1 + seqs, mask=here, other=0) - starts
    lens = tl.load(seq_lens_ptr + seqs, mask=here, other=0)
    blocks = tl.cdiv(query_lens * GROUP, BLOCK_M)
    spans = lens
    if WINDOW > 0:
        spans = tl.minimum(lens, WINDOW + BLOCK_M // GROUP)
    tiles = tl.maximum(tl.cdiv(spans, BLOCK_N), 1)
    splits = count_splits(
        blocks, tiles, num_multiprocessors, num_kv_heads,
        RESIDENT, START_TILES, SPLIT_TILES, MERGE_TILES,
    )  # fmt: skip
    counts = blocks * splits
    first_item = tl.sum(tl.where(seqs < mine, counts, 0), 0)
    first_block = tl.sum(tl.where(seqs < mine, blocks, 0), 0)
    is_mine = seqs == mine
    query_start = tl.sum(tl.where(is_mine, starts, 0), 0)
    query_len = tl.sum(tl.where(is_mine, query_lens, 0), 0)
    seq_len = tl.sum(tl.where(is_mine, lens, 0), 0)
    num_blocks = tl.sum(tl.where(is_mine, blocks, 0), 0)
    num_splits = tl.sum(tl.where(is_mine, splits, 0), 0)
    num_items = num_blocks * num_splits
    for base in range(0, num_items, PLAN_LANES):
        index = base + tl.arange(0, PLAN_LANES)
        item = items_ptr + first_item + index
        fits = (index < num_items) & (first_item + index < item_capacity)
        block = index // num_splits
        tl.store(item, tl.zeros_like(index) + mine, mask=fits)
        tl.store(item + item_capacity, tl.zeros_like(index) + query_start, mask=fits)
        tl.store(item + 2 * item_capacity, tl.zeros_like(index) + query_len, mask=fits)
        tl.store(item + 3 * item_capacity, tl.zeros_like(index) + seq_len, mask=fits)
        tl.store(item + 4 * item_capacity, (num_blocks - 1 - block) * BLOCK_M, mask=fits)
        tl.store(item + 5 * item_capacity, index % num_splits, mask=fits)
        tl.store(item + 6 * item_capacity, tl.zeros_like(index) + num_splits, mask=fits)
        block_ptr = items_ptr + 7 * item_capacity + first_block + block
        tl.store(block_ptr, first_item + index, mask=fits & (index % num_splits == 0))
    if mine == 0:
        tl.store(num_items_ptr, tl.sum(counts, 0))
        tl.store(num_items_ptr + 1, tl.sum(blocks, 0))


@triton.jit
def count_splits(
    blocks, tiles, num_multiprocessors, num_kv_heads,
    RESIDENT: tl.constexpr, START_TILES: tl.constexpr, SPLIT_TILES: tl.constexpr,
    MERGE_TILES: tl.constexpr,
):  # fmt: skip
    """The splits of each sequence's row blocks, `blocks` of them with `tiles` tiles of keys each.

    Programs take as long as their tiles and START_TILES more, and RESIDENT of them, one or two, run
    side by side on a multiprocessor. A merge takes as long as SPLIT_TILES. Each split of a
    row block takes MERGE_TILES more: with splits of the root of the block's tiles times that, tiles
    and merge take the same time. There are 1, 2, 4 or 8 programs on each multiprocessor, whichever
    ends first, or no block is split.
    """
    total = tl.sum(blocks, 0)
    longest = tl.max(tl.where(blocks > 0, tiles, 1), 0)
    least = tl.sqrt(tiles.to(tl.float32) * MERGE_TILES).to(tl.int32)
    least = tl.maximum(tl.maximum(least, tl.cdiv(tiles, MOST_SPLITS)), 1)
    size = longest
    unsplit = tl.cdiv(total * num_kv_heads, num_multiprocessors)
    time = programs_time(unsplit, longest + START_TILES, RESIDENT) - SPLIT_TILES
    programs = tl.full([], 1, tl.int32)
    most = RESIDENT
    if total * num_kv_heads > num_multiprocessors:
        most = RESIDENT * MOST_WAVES
    while programs <= most:
        limit = programs * num_multiprocessors // num_kv_heads
        if total <= limit:
            shorter = shortest_splits(blocks, tiles, least, longest, limit)
            shorter_time = programs_time(programs, shorter + START_TILES, RESIDENT)
            if shorter_time < time:
                size = shorter
                time = shorter_time
        programs = programs * 2
    return tl.cdiv(tiles, tl.maximum(least, size))


@triton.jit
def programs_time(programs, tiles, RESIDENT: tl.constexpr):
    """The time of so many programs on a multiprocessor, of so many tiles each."""
    pairs = programs // 2 * 2 * (RESIDENT - 1)
    return (programs - pairs + pairs * PAIRED) * tiles


@triton.jit
def shortest_splits(blocks, tiles, least, longest, limit):
    """The fewest tiles of a split with which there are at most `limit` items; found by halving.

    Unsplit, there are no more.
    """
    low = tl.full([], 1, tl.int32)
    high = longest
    while low < high:
        middle = (low + high) // 2
        if tl.sum(blocks * tl.cdiv(tiles, tl.maximum(least, middle)), 0) <= limit:
            high = middle
        else:
            low = middle + 1
    return low
