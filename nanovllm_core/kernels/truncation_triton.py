"""top_k and top_p in Triton without sorting; `truncation_reference` says what is computed.

One program per row. Floats become unsigned keys of the same order, and the key at which the kept
ids end is found two bits at a time: each of sixteen passes over the row weighs the ids at or above
three thresholds (a radix selection, as in Alabi et al., "Fast k-Selection Algorithms for Graphics
Processing Units", 2012; top_p weighs by probability what top_k counts). The passes read a row that
stays in the cache, and write nothing; a sort moves the row, with its ids, again and again.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
NUM_WARPS = 32


def cut_top_k_top_p(
    logits_SV: Tensor, which_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, temperature_N: Tensor
) -> None:
    """As `truncation_reference.cut_top_k_top_p`, with sums in float32.

    An id may fall on the other side of a `top_p` that is within their rounding (1e-6) of its share.
    Allocates nothing and never waits for the device.
    """
    if len(which_N):
        cut_top_k_top_p_kernel[(len(which_N),)](
            logits_SV, which_N, top_k_N, top_p_N, temperature_N, logits_SV.stride(0),
            logits_SV.shape[1], TILE=TILE, num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit
def to_key(x):
    """Unsigned keys in the order of the floats; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def to_float(key):
    """The float of a key."""
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, scale):
    """The probability up to a factor: 1 at the top, even where that is infinite."""
    return tl.where(x == top, 1.0, tl.exp2((x - top) * scale))


@triton.jit
def read_tile(row_ptr, first, vocab_size, TILE: tl.constexpr, edits):
    """The logits of ids `first` to `first + TILE - 1`, -inf beyond the end; nothing is edited."""
    ids = first + tl.arange(0, TILE)
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))


@triton.jit
def find_top(row_ptr, vocab_size, TILE: tl.constexpr):
    """The row's largest logit."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    for first in range(0, vocab_size, TILE):
        best = tl.maximum(best, read_tile(row_ptr, first, vocab_size, TILE, None))
    return tl.max(best, axis=0)


@triton.jit
def find_cut(
    row_ptr, vocab_size, top_k, top_p, scale, top, edits, TILE: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """What is kept of a row: all ids above the first result, a key, and at it the first `room`.

    `top_k` int64; `scale` is log2(e) divided by the temperature; `top` the row's largest logit.
    `READ` reads a tile of the row, as `read_tile` does, whose last argument `edits` is.

    Passes 0 to 15 count the ids for `top_k`, pass 16 weighs those that are left, and passes 17 to
    32 weigh for `top_p`. They are one loop, so that a kernel has the code of one pass: it takes
    seconds to compile. In each, a lane adds up its own ids, in float32, and what the lanes have is
    added at the end: sums of whole tiles would cost more than reading them.
    """
    lanes = tl.arange(0, TILE)
    is_counted = top_k < vocab_size
    room, end_of_count = top_k, tl.full((), 0, tl.uint32)
    # The search that goes on: the largest key that weighs `target` or more with all above it.
    threshold, above = end_of_count, tl.full((), 0.0, tl.float64)
    target = top_k.to(tl.float64)
    for step in range(tl.where(is_counted, 0, 16), tl.where(top_p <= 1.0, 33, 16)):
        by_mass = step >= 16
        shift = tl.where(step == 16, 0, tl.where(by_mass, 64, 30) - 2 * step)
        unit = tl.full((), 1, tl.uint32) << shift.to(tl.uint32)
        lane_1 = tl.zeros((TILE,), tl.float32)
        lane_2 = tl.zeros((TILE,), tl.float32)
        lane_3 = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            x = READ(row_ptr, first, vocab_size, TILE, edits)
            key = to_key(x)
            weight = tl.where(first + lanes < vocab_size, 1.0, 0.0)
            if by_mass:
                weight = weigh(x, top, scale)
            lane_1 += tl.where(key >= threshold + unit, weight, 0.0)
            lane_2 += tl.where(key >= threshold + 2 * unit, weight, 0.0)
            lane_3 += tl.where(key >= threshold + 3 * unit, weight, 0.0)
        weight_1 = tl.sum(lane_1.to(tl.float64), axis=0)
        weight_2 = tl.sum(lane_2.to(tl.float64), axis=0)
        weight_3 = tl.sum(lane_3.to(tl.float64), axis=0)
        if step == 16:
            room = top_k - above.to(tl.int64)
            kept = weight_1
            if is_counted:
                kept += room * weigh(to_float(threshold), top, scale)
            # Above 0, so that the likeliest id stays however small top_p is.
            target = tl.maximum(top_p * kept, 1e-30)
            end_of_count, above = threshold, 0.0 * above
            threshold = tl.full((), 0, tl.uint32)
        elif weight_3 >= target:
            threshold += 3 * unit
        elif weight_2 >= target:
            threshold += 2 * unit
            above = weight_3
        elif weight_1 >= target:
            threshold += unit
            above = weight_2
        else:
            above = weight_1

    if top_p <= 1.0:
        share = weigh(to_float(threshold), top, scale)
        fits = tl.maximum(tl.ceil((target - above) / share), 1.0).to(tl.int64)
        if threshold > end_of_count:
            room = fits
        elif threshold == end_of_count:
            room = tl.minimum(fits, room)
        threshold = tl.maximum(threshold, end_of_count)
    else:
        room = top_k - above.to(tl.int64)
    return threshold, room


@triton.jit
def keep_of_tile(x, threshold, room, num_at, first, vocab_size, TILE: tl.constexpr):
    """Which ids of a tile `find_cut` keeps, and `num_at` with those at the threshold here.

    Lanes beyond the end may seem kept.
    """
    ids = first + tl.arange(0, TILE)
    key = to_key(x)
    at = ((key == threshold) & (ids < vocab_size)).to(tl.int32)
    before = num_at + tl.cumsum(at, axis=0) - 1
    keep = (key > threshold) | ((at != 0) & (before < room))
    return keep, num_at + tl.sum(at, axis=0)


# Both are parts of one upload, whose addresses follow from how many rows ask for what.
@triton.jit(do_not_specialize_on_alignment=["which_ptr", "top_k_ptr"])
def cut_top_k_top_p_kernel(
    logits_ptr, which_ptr, top_k_ptr, top_p_ptr, temperature_ptr, row_stride, vocab_size,
    TILE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(which_ptr + entry) * row_stride
    scale = 1.4426950408889634 / tl.load(temperature_ptr + entry)
    top_k = tl.load(top_k_ptr + entry)
    top_p = tl.load(top_p_ptr + entry)
    top = tl.full((), 0.0, tl.float32)
    if top_p <= 1.0:
        top = find_top(row_ptr, vocab_size, TILE)
    threshold, room = find_cut(row_ptr, vocab_size, top_k, top_p, scale, top, None, TILE, read_tile)
    num_at = tl.full((), 0, tl.int64)
    for first in range(0, vocab_size, TILE):
        x = read_tile(row_ptr, first, vocab_size, TILE, None)
        keep, num_at = keep_of_tile(x, threshold, room, num_at, first, vocab_size, TILE)
        ids = first + tl.arange(0, TILE)
        tl.store(row_ptr + ids, float("-inf"), mask=(ids < vocab_size) & (keep == 0))
