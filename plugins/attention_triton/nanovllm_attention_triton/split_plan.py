"""The plan of a step with few rows of prompts: which contexts are split, on the device.

Where the row blocks of a step leave a part of the GPU idle, several programs attend one block, each
to a part of its keys ("split KV"). The plan lists the items, one for each split of a row block,
from the true lengths, so that a captured graph stays valid.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl

SEQ = tl.constexpr(0)
QUERY_START = tl.constexpr(1)
QUERY_LEN = tl.constexpr(2)
SEQ_LEN = tl.constexpr(3)
FIRST_ROW = tl.constexpr(4)
SPLIT = tl.constexpr(5)
NUM_SPLITS = tl.constexpr(6)
ITEM_FIELDS = tl.constexpr(7)
"""An item: its sequence, that one's first query and its numbers of queries and of keys, the first
row of the block, the split, and the block's number of splits."""
MOST_SPLITS = tl.constexpr(64)
"""Of a row block."""
MOST_WAVES = tl.constexpr(4)
"""Programs of split blocks fill the GPU so many times at most. Beyond, uneven ends count for
little."""
PAIRED = tl.constexpr(0.8)
"""Of the time of one program after the other, that of two that share a multiprocessor."""
PLAN_LANES = tl.constexpr(128)
"""Items of a sequence that are listed at a time."""


@triton.jit(do_not_specialize=["num_seqs", "num_multiprocessors", "num_kv_heads"])
def plan_splits_kernel(
    seq_lens_ptr,
    query_start_ptr,
    items_ptr,
    first_items_ptr,
    counts_ptr,
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

    `counts`: the items, and the row blocks, of which `first_items` names the first items. WINDOW
    above 0: the keys that a query sees. A sequence's last rows, which see the most keys, are its
    first block. Items beyond the capacity are counted and not listed: a step that has so many is
    not attended by items.
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
        split = index % num_splits
        same = tl.zeros_like(index)
        tl.store(item + SEQ * item_capacity, same + mine, mask=fits)
        tl.store(item + QUERY_START * item_capacity, same + query_start, mask=fits)
        tl.store(item + QUERY_LEN * item_capacity, same + query_len, mask=fits)
        tl.store(item + SEQ_LEN * item_capacity, same + seq_len, mask=fits)
        tl.store(item + FIRST_ROW * item_capacity, (num_blocks - 1 - block) * BLOCK_M, mask=fits)
        tl.store(item + SPLIT * item_capacity, split, mask=fits)
        tl.store(item + NUM_SPLITS * item_capacity, same + num_splits, mask=fits)
        is_first = fits & (split == 0)
        tl.store(first_items_ptr + first_block + block, first_item + index, mask=is_first)
    if mine == 0:
        tl.store(counts_ptr, tl.sum(counts, 0))
        tl.store(counts_ptr + 1, tl.sum(blocks, 0))


@triton.jit
def count_splits(
    blocks, tiles, num_multiprocessors, num_kv_heads,
    RESIDENT: tl.constexpr, START_TILES: tl.constexpr, SPLIT_TILES: tl.constexpr,
    MERGE_TILES: tl.constexpr,
):  # fmt: skip
    """The splits of each sequence's row blocks, `blocks` of them with `tiles` tiles of keys each.

    Every program takes as long as its tiles and START_TILES more, RESIDENT of them, one or two, run
    side by side on a multiprocessor, and any merge takes as long as SPLIT_TILES. Splits are such
    that one program, two, and so on up to MOST_WAVES times RESIDENT stand on each multiprocessor,
    whichever ends first, or no block is split. Row blocks that are no more than one on each fill
    the GPU once at most: more programs would gain nothing.

    Merging a split takes as long as MERGE_TILES. Splits of sqrt(tiles * MERGE_TILES) tiles take as
    long as the merge of all, so none is shorter.
    """
    total = tl.sum(blocks, 0)
    min_tiles = tl.sqrt(tiles.to(tl.float32) * MERGE_TILES).to(tl.int32)
    min_tiles = tl.maximum(tl.maximum(min_tiles, tl.cdiv(tiles, MOST_SPLITS)), 1)
    longest = tl.max(tl.where(blocks > 0, tiles, 1), 0)
    longest_min = tl.max(tl.where(blocks > 0, min_tiles, 1), 0)
    split_tiles = longest
    whole = tl.cdiv(total * num_kv_heads, num_multiprocessors)
    time = programs_time(whole, longest + START_TILES, RESIDENT) - SPLIT_TILES
    programs = tl.full([], 1, tl.int32)
    most = RESIDENT
    if total * num_kv_heads > num_multiprocessors:
        most = RESIDENT * MOST_WAVES
    while programs <= most:
        limit = programs * num_multiprocessors // num_kv_heads
        if total <= limit:
            shorter = shortest_splits(blocks, tiles, min_tiles, longest, limit)
            shorter = tl.maximum(shorter, longest_min)
            shorter_time = programs_time(programs, shorter + START_TILES, RESIDENT)
            if shorter_time < time:
                split_tiles = shorter
                time = shorter_time
        programs = programs * 2
    return tl.cdiv(tiles, tl.maximum(min_tiles, split_tiles))


@triton.jit
def programs_time(programs, tiles, RESIDENT: tl.constexpr):
    """The time of so many programs on a multiprocessor, of so many tiles each."""
    paired = programs // 2 * 2 * (RESIDENT - 1)
    return (programs - paired + paired * PAIRED) * tiles


@triton.jit
def shortest_splits(blocks, tiles, min_tiles, longest, limit):
    """The fewest tiles of splits, `min_tiles` or more, that make at most `limit` items.

    Found by halving; whole blocks make no more.
    """
    low = tl.full([], 1, tl.int32)
    high = longest
    while low < high:
        middle = (low + high) // 2
        if tl.sum(blocks * tl.cdiv(tiles, tl.maximum(min_tiles, middle)), 0) <= limit:
            high = middle
        else:
            low = middle + 1
    return low
