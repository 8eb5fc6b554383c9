"""For the kernels that sum and norm whole rows: waves of rows, and the norm of a row of words.

A wave has as many rows as there are programs, the last one fewer. Each program norms one row of a
wave, for which it polls, and sends an equal share of all its words: one multiprocessor alone is too
slow to send a row. A program has sent WAVES_AHEAD waves before it polls a row of the first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm_executor_parallel.slots import BLOCK, bits, half

SHARE = tl.constexpr(BLOCK)
"""A program sends a multiple of so many words."""


@triton.jit
def find_share(wave, num_rows, WORDS: tl.constexpr):
    """The first word of this program's share of a wave, and the end of it."""
    first = wave * tl.num_programs(0)
    num_words = min(tl.num_programs(0), num_rows - first) * WORDS
    share = tl.cdiv(tl.cdiv(num_words, SHARE), tl.num_programs(0)) * SHARE
    begin = min(tl.program_id(0) * share, num_words)
    return first * WORDS + begin, first * WORDS + min(begin + share, num_words)


@triton.jit
def load_factors(weight_ptr, columns, mask, DTYPE: tl.constexpr):
    """A row's factors by word [BLOCK]: as they are in words of DTYPE, or two of float32.

    The kernels load them before they wait.
    """
    if weight_ptr.dtype.element_ty == DTYPE:
        words_ptr = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        words = tl.load(words_ptr + columns, mask=mask, other=0)
        return words, words
    else:
        low = tl.load(weight_ptr + 2 * columns, mask=mask, other=0.0)
        return low, tl.load(weight_ptr + 2 * columns + 1, mask=mask, other=0.0)


@triton.jit
def norm_row(words, factors, DTYPE: tl.constexpr, NUMBERS: tl.constexpr, EPS: tl.constexpr):
    """A row's words [BLOCK], with zeros behind its end -> those of its norm.

    Rounded as `KernelSet.rms_norm` says.
    """
    low_factors, high_factors = factors
    if DTYPE.is_fp32():
        x = words.to(tl.float32, bitcast=True)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / NUMBERS + EPS)
        return (normed * low_factors.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    else:
        low, high = half(words, DTYPE), half(words >> 16, DTYPE)
        scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / NUMBERS + EPS)
        low, high = low * scale, high * scale
        if low_factors.dtype == tl.int32:
            low = low.to(DTYPE).to(tl.float32) * half(low_factors, DTYPE)
            high = high.to(DTYPE).to(tl.float32) * half(high_factors >> 16, DTYPE)
        else:
            low *= low_factors
            high *= high_factors
        return (bits(low, DTYPE) & 0xFFFF) | (bits(high, DTYPE) << 16)
