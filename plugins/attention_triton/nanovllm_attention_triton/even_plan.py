"""The plan of a decode step for persistent programs: every program gets as many tiles as any other.

The tiles of all rows, one row behind the other, are cut into equal parts, one for each program
("stream-K", Osama et al. 2023). An item is what a part has of a row: a program's items are
neighbours in the list, and a row has an item in every part that it reaches into.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# Triton is untyped, and a kernel's parameters are traced, not typed.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from nanovllm_attention_triton.decode_plan import look_up_blocks


@triton.jit(do_not_specialize=["num_rows", "max_len", "num_parts", "min_tiles"])
def even_plan_kernel(
    seq_lens_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    part_starts_ptr,
    table_stride,
    num_rows,
    max_len,
    num_parts,
    min_tiles,
    item_capacity,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """List the step's items, see `decode_plan`, and the first item of each part: one program.

    A part has `min_tiles` tiles at least, so few tiles make fewer parts. Part p has the items from
    `part_starts` p on, and before p + 1. A row has at most `max_len` tokens; a row without tokens
    keeps one item, which writes zeros. There are at most as many items as rows and parts together.
    DEPENDENT: as in `plan_kernel`.
    """
    if DEPENDENT:
        gdc_wait()
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    lens = tl.minimum(tl.maximum(lens, 0), max_len)
    tiles = tl.cdiv(lens, TILE)
    before = tl.cumsum(tiles, 0) - tiles
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_parts), min_tiles)
    first_part = before // share
    counts = (before + tl.maximum(tiles, 1) - 1) // share - first_part + 1
    counts = tl.where(rows < num_rows, counts, 0)
    first = tl.cumsum(counts, 0) - counts
    num_items = tl.sum(counts, 0)
    tl.store(items_ptr + 6 * item_capacity + rows, first, mask=rows < num_rows)
    # Parts without tiles have no item; those that there are replace this.
    parts = tl.arange(0, BLOCK_PARTS)
    tl.store(part_starts_ptr + parts, tl.where(parts == 0, 0, num_items), mask=parts <= num_parts)
    tl.debug_barrier()
    for index in range(0, tl.max(counts, 0)):
        here = index < counts
        part = first_part + index
        begin = tl.maximum(part * share - before, 0)
        end = tl.minimum(((part + 1) * share - before) * TILE, lens)
        item = items_ptr + first + index
        tl.store(item, rows, mask=here)
        tl.store(item + item_capacity, begin * TILE, mask=here)
        tl.store(item + 2 * item_capacity, end, mask=here)
        tl.store(item + 3 * item_capacity, first, mask=here)
        tl.store(item + 4 * item_capacity, counts, mask=here)
        # The item that begins with its part; rows without tokens go to whom they lie between.
        begins_part = here & (tiles > 0) & (before + begin == part * share)
        tl.store(part_starts_ptr + part, first + index, mask=begins_part & (part > 0))
    if BLOCK_SIZE % TILE == 0:
        look_up_blocks(table_ptr, items_ptr, table_stride, item_capacity, num_items, BLOCK_SIZE)
    # Released behind all other stores, as in `decode_plan.plan_kernel`.
    tl.debug_barrier()
    tl.atomic_xchg(num_items_ptr, num_items, sem="release", scope="gpu")
