"""The arithmetic of grids and tiles for code that launches kernels.

Triton's own functions of these names are for kernels too, and cost a launch several microseconds.
"""

from __future__ import annotations


def cdiv(value: int, size: int) -> int:
    """How many pieces of `size` hold `value`."""
    return -(-value // size)


def next_power_of_2(value: int) -> int:
    """The least power of two that is at least `value`; 0 for 0, as Triton has it."""
    return 1 << (value - 1).bit_length() if value > 0 else 0
