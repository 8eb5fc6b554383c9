"""Sizes of heads, and the powers of two that tiles are rounded up to."""

from __future__ import annotations

MIN_BLOCK_D = 16
"""The fewest columns that `tl.dot` multiplies."""
SMALL, WIDE = 64, 128
"""Heads up to the first, and above the second, have tables of constants of their own."""


def next_power_of_2(value: int) -> int:
    """The least power of two that is at least `value` (and 1)."""
    return 1 << max(value - 1, 0).bit_length()


def padded_head_size(head_size: int) -> int:
    """The columns of a tile whose first `head_size` are real."""
    return max(next_power_of_2(head_size), MIN_BLOCK_D)


def front_columns(key_size: int) -> int:
    """The greatest power of two that is at most `key_size`: the columns multiplied first."""
    return 1 << (key_size.bit_length() - 1)
