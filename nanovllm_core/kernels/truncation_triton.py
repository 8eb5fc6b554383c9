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
def find_threshold(
    row_ptr, vocab_size, top, scale, target, edits,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The largest key that weighs `target` or more with all above it, and the weight of those.

    Each lane adds up its own ids, in float32, and what the lanes have is added once a pass: sums
    of whole tiles would cost more than reading them.
    """
    lanes = tl.arange(0, TILE)
    threshold = tl.full((), 0, tl.uint32)
    above = target * 0.0
    for step in range(16):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        lane_1 = tl.zeros((TILE,), tl.float32)
        lane_2 = tl.zeros((TILE,), tl.float32)
        lane_3 = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            x = READ(row_ptr, first, vocab_size, TILE, edits)
            key = to_key(x)
            weight = weigh(x, top, scale)
            if not BY_MASS:
                weight = tl.where(first + lanes < vocab_size, 1.0, 0.0)
            lane_1 += tl.where(key >= threshold + unit, weight, 0.0)
            lane_2 += tl.where(key >= threshold + 2 * unit, weight, 0.0)
            lane_3 += tl.where(key >= threshold + 3 * unit, weight, 0.0)
        weight_1 = tl.sum(lane_1.to(tl.float64), axis=0)
        weight_2 = tl.sum(lane_2.to(tl.float64), axis=0)
        weight_3 = tl.sum(lane_3.to(tl.float64), axis=0)
        if weight_3 >= target:
            threshold += 3 * unit
        elif weight_2 >= target:
            threshold += 2 * unit
            above = weight_3
        elif weight_1 >= target:
            threshold += unit
            above = weight_2
        else:
            above = weight_1
    return threshold, above


@triton.jit
def find_cut(
    row_ptr, vocab_size, top_k, top_p, scale, edits, TILE: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """What is kept of a row: all ids above the first result, a key, and at it the first `room`.

    `top_k` int64; `scale` is log2(e) divided by the temperature. `READ` reads a tile of the row, as
    `read_tile` does, whose last argument `edits` is.
    """
    threshold = tl.full((), 0, tl.uint32)
    room = top_k
    if top_k < vocab_size:
        threshold, above = find_threshold(
            row_ptr, vocab_size, 0.0, 0.0, top_k.to(tl.float64), edits, False, TILE, READ
        )
        room = top_k - above.to(tl.int64)

    if top_p <= 1.0:
        best = tl.full((TILE,), float("-inf"), tl.float32)
        for first in range(0, vocab_size, TILE):
            x = READ(row_ptr, first, vocab_size, TILE, edits)
            best = tl.maximum(best, x)
        top = tl.max(best, axis=0)
        mass = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            x = READ(row_ptr, first, vocab_size, TILE, edits)
            mass += tl.where(to_key(x) > threshold, weigh(x, top, scale), 0.0)
        kept = tl.sum(mass.to(tl.float64), axis=0)
        if top_k < vocab_size:
            kept += room * weigh(to_float(threshold), top, scale)
        # Above 0, so that the likeliest id stays however small top_p is.
        target = tl.maximum(top_p * kept, 1e-30)
        end, above = find_threshold(
            row_ptr, vocab_size, top, scale, target, edits, True, TILE, READ
        )
        share = weigh(to_float(end), top, scale)
        fits = tl.maximum(tl.ceil((target - above) / share), 1.0).to(tl.int64)
        if end > threshold:
            threshold, room = end, fits
        elif end == threshold:
            room = tl.minimum(fits, room)
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
    threshold, room = find_cut(row_ptr, vocab_size, top_k, top_p, scale, None, TILE, read_tile)
    num_at = tl.full((), 0, tl.int64)
    for first in range(0, vocab_size, TILE):
        x = read_tile(row_ptr, first, vocab_size, TILE, None)
        keep, num_at = keep_of_tile(x, threshold, room, num_at, first, vocab_size, TILE)
        ids = first + tl.arange(0, TILE)
        tl.store(row_ptr + ids, float("-inf"), mask=(ids < vocab_size) & (keep == 0))
