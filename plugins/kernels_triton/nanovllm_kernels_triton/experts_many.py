"""Mixtures of experts for many tokens: pairs in the order of their experts, then grouped products.

`sort_pairs_kernel` orders the (token, expert) pairs by expert and divides each
expert's rows into tiles of BLOCK_M; of more pairs than a block, `count_pairs_kernel` and
`place_pairs_kernel` do so.
`grouped_gate_up_kernel` and `grouped_down_kernel` multiply a tile by its expert's weights on the
tensor cores, so that each weight is read from memory once; `combine_kernel` sums the results of a
token's experts in their order. Nothing is added in an order that could change, and no grid depends
on who chose what.

Shapes: pair p belongs to token p // CHOSEN; rows are places in the sorted order. `tiles_ptr` int32
[3, tile_stride]: each tile's expert, first row, and the row behind its expert's last one.
`pairs_ptr` int32 [tile_stride, BLOCK_M]: the pairs of each tile, so that they need not wait for its
first row. `rows_ptr` int32 [pairs]: each pair's row.

DEPENDENT: see `nanovllm_core.kernels.launch_options`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels_triton.experts_few import gated

COUNTED = tl.constexpr(32)
"""Blocks whose counts `place_pairs_kernel` reads at once."""


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr, counts_ptr, num_pairs,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each expert's pairs in a block, one per program, are counted: `counts_ptr` [blocks, BINS]."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pairs < num_pairs
    ids = tl.load(ids_ptr + pairs, mask=there, other=0)
    counts = tl.histogram(ids, BINS, mask=there)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_pairs", "tile_stride", "block_m"])
def place_pairs_kernel(
    ids_ptr, counts_ptr, pairs_ptr, rows_ptr, tiles_ptr, num_tiles_ptr,
    num_pairs, tile_stride, block_m,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `sort_pairs_kernel`, for any number of pairs: a program orders a block, counted before.

    The programs take turns to write each expert's next tile, of `block_m` rows.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    lanes, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    pairs = block * BLOCK + lanes
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=BINS)
    counts, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, COUNTED):
        others = first + tl.arange(0, COUNTED)
        more_ptrs = counts_ptr + others[:, None] * BINS + bins[None, :]
        more = tl.load(more_ptrs, mask=(others < num_blocks)[:, None], other=0)
        counts += tl.sum(more, axis=0)
        before += tl.sum(tl.where((others < block)[:, None], more, 0), axis=0)
    rows = tl.cumsum(counts, axis=0) - counts
    tiles = (counts + block_m - 1) // block_m
    first_tiles = tl.cumsum(tiles, axis=0) - tiles
    for turn in range(block, tl.max(tiles, axis=0), num_blocks):
        tile_ptrs = tiles_ptr + first_tiles + turn
        tl.store(tile_ptrs, bins, mask=turn < tiles)
        tl.store(tile_ptrs + tile_stride, rows + turn * block_m, mask=turn < tiles)
        tl.store(tile_ptrs + 2 * tile_stride, rows + counts, mask=turn < tiles)
    if block == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    own = tl.load(counts_ptr + block * BINS + bins)
    offsets = rows + before - (tl.cumsum(own, axis=0) - own)
    keys = tl.sort(ids * BLOCK + lanes)
    live, experts = keys < BINS * BLOCK, tl.minimum(keys // BLOCK, BINS - 1)
    pairs, places = block * BLOCK + keys % BLOCK, tl.gather(offsets, experts, axis=0) + lanes
    slots = places + tl.gather(first_tiles * block_m - rows, experts, axis=0)
    tl.store(pairs_ptr + slots, pairs, mask=live)
    tl.store(rows_ptr + pairs, places, mask=live)


@triton.jit(do_not_specialize=["num_pairs", "tile_stride", "block_m"])
def sort_pairs_kernel(
    ids_ptr, pairs_ptr, rows_ptr, tiles_ptr, num_tiles_ptr, num_pairs, tile_stride, block_m,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program for each expert writes its tiles of `block_m` rows, and the places of its pairs.

    All pairs are in one block. The first program writes the number of tiles.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    pairs, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    there = pairs < num_pairs
    ids = tl.load(ids_ptr + pairs, mask=there, other=-1)
    counts = tl.histogram(tl.where(there, ids, 0), BINS, mask=there)
    row = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    end = row + tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    tiles = (counts + block_m - 1) // block_m
    tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    is_own = ids == expert
    places = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    for first in range(row, end, block_m):
        tile_ptr = tiles_ptr + tile + (first - row) // block_m
        tl.store(tile_ptr, expert)
        tl.store(tile_ptr + tile_stride, first)
        tl.store(tile_ptr + 2 * tile_stride, end)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    tl.store(pairs_ptr + tile * block_m + places, pairs, mask=is_own)
    tl.store(rows_ptr + pairs, row + places, mask=is_own)


@triton.jit(do_not_specialize=["tile_stride"])
def grouped_gate_up_kernel(
    x_ptr, pairs_ptr, tiles_ptr, num_tiles_ptr, weight_ptr, weight_desc, hidden_ptr, tile_stride,
    x_stride,
    X_UNIT: tl.constexpr, CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of each row -> `hidden_ptr` [rows, OUTPUTS], BLOCK_N of them at a time.

    Weight [experts, 2·OUTPUTS, INPUTS], the gate's rows first. `x_stride` is in units of X_UNIT
    numbers, see `in_units`. `weight_desc`, if not None,
    describes it as [experts, 2, OUTPUTS, INPUTS] in blocks [1, 2, BLOCK_N, BLOCK_K].
    """
    COLUMN_TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    lanes, places = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    num_steps = _steps_of_program(num_tiles_ptr, COLUMN_TILES, STEPS)
    tile, expert, first, end = _tile_of_step(0, tiles_ptr, tile_stride, COLUMN_TILES, STEPS)
    tokens = places
    y = _zeros(BLOCK_M, 2 * BLOCK_N)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        if step % STEPS == 0:
            tile, expert, first, end = _tile_of_step(
                step, tiles_ptr, tile_stride, COLUMN_TILES, STEPS
            )
            slots = tile // COLUMN_TILES * BLOCK_M + places
            tokens = tl.load(pairs_ptr + slots, mask=first + places < end, other=0) // CHOSEN
        rows = first + places
        live = rows < end
        x_ptrs = x_ptr + tokens.to(tl.int64) * (x_stride * X_UNIT)
        columns = step % STEPS * BLOCK_K + lanes
        x = _load_tile(x_ptrs, live, columns, INPUTS, BLOCK_K)
        if weight_desc is not None:
            place = [expert, 0, tile % COLUMN_TILES * BLOCK_N, step % STEPS * BLOCK_K]
            weight = weight_desc.load(place).reshape(2 * BLOCK_N, BLOCK_K)
        else:
            halves = tl.arange(0, 2 * BLOCK_N)
            weight_rows = tile % COLUMN_TILES * BLOCK_N + halves % BLOCK_N
            weight_ptrs = weight_ptr + expert.to(tl.int64) * (2 * OUTPUTS * INPUTS)
            weight_ptrs += (weight_rows + halves // BLOCK_N * OUTPUTS) * INPUTS
            weight = _load_tile(weight_ptrs, weight_rows < OUTPUTS, columns, INPUTS, BLOCK_K)
        y = _product(x, weight, y)
        if step % STEPS == STEPS - 1:
            outputs = tile % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
            hidden_ptrs = hidden_ptr + rows.to(tl.int64) * OUTPUTS
            gate, up = _halves(y, BLOCK_M, BLOCK_N)
            _store_tile(hidden_ptrs, live, outputs, outputs < OUTPUTS, gated(gate, up, dtype))
            y = _zeros(BLOCK_M, 2 * BLOCK_N)


@triton.jit(do_not_specialize=["tile_stride"])
def grouped_down_kernel(
    hidden_ptr, hidden_desc, tiles_ptr, num_tiles_ptr, weight_ptr, weight_desc, result_ptr,
    tile_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each row's result, rounded -> `result_ptr` [rows, OUTPUTS].

    Weight [experts, OUTPUTS, INPUTS]. The descriptors, if not None, are of `hidden_ptr` [rows,
    INPUTS] in blocks [BLOCK_M, BLOCK_K] and of the weight in blocks [1, BLOCK_N, BLOCK_K].
    """
    COLUMN_TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    lanes, places = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    num_steps = _steps_of_program(num_tiles_ptr, COLUMN_TILES, STEPS)
    tile, expert, first, end = _tile_of_step(0, tiles_ptr, tile_stride, COLUMN_TILES, STEPS)
    y = _zeros(BLOCK_M, BLOCK_N)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        if step % STEPS == 0:
            tile, expert, first, end = _tile_of_step(
                step, tiles_ptr, tile_stride, COLUMN_TILES, STEPS
            )
        rows = first + places
        live = rows < end
        start, first_output = step % STEPS * BLOCK_K, tile % COLUMN_TILES * BLOCK_N
        columns, outputs = start + lanes, first_output + tl.arange(0, BLOCK_N)
        there = outputs < OUTPUTS
        if hidden_desc is not None:  # rows of the next expert come along, and are not stored
            hidden = hidden_desc.load([first, start])
            weight = weight_desc.load([expert, first_output, start]).reshape(BLOCK_N, BLOCK_K)
        else:
            hidden_ptrs = hidden_ptr + rows.to(tl.int64) * INPUTS
            weight_ptrs = weight_ptr + expert.to(tl.int64) * (OUTPUTS * INPUTS) + outputs * INPUTS
            hidden = _load_tile(hidden_ptrs, live, columns, INPUTS, BLOCK_K)
            weight = _load_tile(weight_ptrs, there, columns, INPUTS, BLOCK_K)
        y = _product(hidden, weight, y)
        if step % STEPS == STEPS - 1:
            result_ptrs = result_ptr + rows.to(tl.int64) * OUTPUTS
            _store_tile(result_ptrs, live, outputs, there, y.to(result_ptr.dtype.element_ty))
            y = _zeros(BLOCK_M, BLOCK_N)


@triton.jit
def combine_kernel(
    result_ptr, rows_ptr, weights_ptr, out_ptr, out_stride,
    CHOSEN: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's results, wherever their rows are, a piece of it per program.

    ADD: `out_ptr` holds the residual, which is in the sum.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    out_ptrs = out_ptr + token * out_stride + columns
    y = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        y += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        row = tl.load(rows_ptr + pair).to(tl.int64)
        result = tl.load(result_ptr + row * SIZE + columns, mask=mask, other=0.0)
        y += result.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _steps_of_program(num_tiles_ptr, COLUMN_TILES: tl.constexpr, STEPS: tl.constexpr):
    """The steps of all tiles of this program, which are one in every `num_programs`."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.load(num_tiles_ptr) * COLUMN_TILES
    return (num_tiles - program + num_programs - 1) // num_programs * STEPS


@triton.jit
def _tile_of_step(
    step, tiles_ptr, tile_stride, COLUMN_TILES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """A step's tile, its expert, its first row, and the row behind the expert's last."""
    tile = tl.program_id(0) + step // STEPS * tl.num_programs(0)
    tile_ptr = tiles_ptr + tile // COLUMN_TILES
    first, end = tl.load(tile_ptr + tile_stride), tl.load(tile_ptr + 2 * tile_stride)
    return tile, tl.load(tile_ptr), first, end


@triton.jit
def _load_tile(row_ptrs, live, columns, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K]; zeros where there is no row or column."""
    mask = live[:, None]
    if INPUTS % BLOCK_K != 0:
        mask = mask & (columns < INPUTS)[None, :]
    return tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of sums as `_product` wants it.

    Hopper's product of a whole warp group takes a first operand of 64 rows: with fewer tokens it is
    the weight.
    """
    return tl.zeros((BLOCK_M, BLOCK_N) if BLOCK_M >= 64 else (BLOCK_N, BLOCK_M), tl.float32)


@triton.jit
def _product(x, weight, y):
    """y + x W^T, or y + W x^T where x has few rows."""
    if x.shape[0] >= 64:
        y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
    else:
        y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
    return y


@triton.jit
def _halves(y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The gate's sums and those of up: one half of the weight rows each."""
    if BLOCK_M >= 64:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    return gate, up


@triton.jit
def _store_tile(row_ptrs, live, outputs, there, y):
    """y to its rows and columns, whichever of them comes first in it."""
    if row_ptrs.shape[0] < 64:
        y = tl.trans(y)
    mask = live[:, None] & there[None, :]
    tl.store(row_ptrs[:, None] + outputs[None, :], y, mask=mask)
