"""top_k and top_p in Triton without sorting; `truncation_reference` says what is computed.

One program per row. Floats become unsigned keys of the same order, and the key at which the kept
ids end is found four bits at a time: each pass over the row weighs the ids at or above sixteen
thresholds (a radix selection, as in Alabi et al., "Fast k-Selection Algorithms for Graphics
Processing Units", 2012; top_p weighs by probability what top_k counts). At most eighteen passes
read the row, which stays in the cache; a sort moves it, with its ids, many more times.
"""

# Triton ships no types, and a kernel's arguments have none a checker knows.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
NUM_WARPS = 8


def cut_top_k_top_p(
    logits_SV: Tensor, which_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, temperature_N: Tensor
) -> None:
    """As `truncation_reference.cut_top_k_top_p`, with tile sums in float32.

    An id may fall on the other side of a `top_p` that is within their rounding (1e-6) of its share.
    Allocates nothing and never waits for the device.
    """
    if len(which_N):
        cut_top_k_top_p_kernel[(len(which_N),)](
            logits_SV,
            which_N,
            top_k_N,
            top_p_N,
            temperature_N,
            logits_SV.stride(0),
            logits_SV.shape[1],
            TILE=TILE,
            num_warps=NUM_WARPS,
        )


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
def weigh(x, top):
    """exp(x - top), the probability up to a factor; 1 at the top even where that is infinite."""
    return tl.where(x == top, 1.0, tl.exp(x - top))


@triton.jit
def load_tile(row_ptr, ids, vocab_size, temperature):
    """Tempered logits; nothing in the row weighs less than what is beyond its end."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    return tl.div_rn(logits, temperature)


@triton.jit
def find_threshold(
    row_ptr, vocab_size, temperature, top, target, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """The largest key that weighs `target` or more with all above it, and the weight of those."""
    digits = tl.arange(0, 16)
    lanes = tl.arange(0, TILE)
    threshold = tl.full((), 0, tl.uint32)
    above = target * 0.0
    for step in range(8):
        shift = 28 - 4 * step
        thresholds = threshold + (digits << shift).to(tl.uint32)
        weights = tl.zeros((16,), tl.float64)
        for first in range(0, vocab_size, TILE):
            ids = first + lanes
            x = load_tile(row_ptr, ids, vocab_size, temperature)
            weight = weigh(x, top) if BY_MASS else tl.where(ids < vocab_size, 1.0, 0.0)
            reached = to_key(x)[:, None] >= thresholds[None, :]
            weights += tl.sum(tl.where(reached, weight[:, None], 0.0), axis=0).to(tl.float64)
        # They fall from digit to digit; the first is what the step before has found.
        digit = tl.maximum(tl.sum((weights >= target).to(tl.int32), axis=0) - 1, 0)
        next_above = tl.sum(tl.where(digits == digit + 1, weights, 0.0), axis=0)
        above = tl.where(digit < 15, next_above, above)
        threshold += (digit << shift).to(tl.uint32)
    return threshold, above


@triton.jit
def cut_top_k_top_p_kernel(
    logits_ptr,
    which_ptr,
    top_k_ptr,
    top_p_ptr,
    temperature_ptr,
    row_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(which_ptr + entry) * row_stride
    temperature = tl.load(temperature_ptr + entry)
    top_k = tl.load(top_k_ptr + entry)
    top_p = tl.load(top_p_ptr + entry)
    lanes = tl.arange(0, TILE)

    # What is kept: all ids above `threshold`, and the first `room` of those at it.
    threshold = tl.full((), 0, tl.uint32)
    room = top_k
    if top_k < vocab_size:
        threshold, above = find_threshold(
            row_ptr, vocab_size, temperature, 0.0, top_k.to(tl.float64), False, TILE
        )
        room = top_k - above.to(tl.int64)

    if top_p <= 1.0:
        best = tl.full((TILE,), float("-inf"), tl.float32)
        for first in range(0, vocab_size, TILE):
            best = tl.maximum(best, load_tile(row_ptr, first + lanes, vocab_size, temperature))
        top = tl.max(best, axis=0)
        kept = tl.zeros((), tl.float64)
        for first in range(0, vocab_size, TILE):
            x = load_tile(row_ptr, first + lanes, vocab_size, temperature)
            kept += tl.sum(tl.where(to_key(x) > threshold, weigh(x, top), 0.0), axis=0)
        if top_k < vocab_size:
            kept += room * weigh(to_float(threshold), top)
        # Above 0, so that the likeliest id stays however small top_p is.
        target = tl.maximum(top_p * kept, 1e-30)
        end, above = find_threshold(row_ptr, vocab_size, temperature, top, target, True, TILE)
        share = weigh(to_float(end), top)
        fits = tl.maximum(tl.ceil((target - above) / share), 1.0).to(tl.int64)
        room = tl.where(end == threshold, tl.minimum(fits, room), room)
        room = tl.where(end > threshold, fits, room)
        threshold = tl.maximum(end, threshold)

    num_at = tl.zeros((), tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + lanes
        x = load_tile(row_ptr, ids, vocab_size, temperature)
        key = to_key(x)
        at = (key == threshold) & (ids < vocab_size)
        before = num_at + tl.cumsum(at.to(tl.int32), axis=0) - 1
        keep = (key > threshold) | (at & (before < room))
        tl.store(row_ptr + ids, float("-inf"), mask=(ids < vocab_size) & (keep == 0))
        num_at += tl.sum(at.to(tl.int32), axis=0)
