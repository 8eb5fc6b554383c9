"""How a kernel is told the distance of rows."""

_UNIT = 8
"""Numbers of half precision that are loaded at once, in 16 bytes."""


def in_units(stride: int) -> tuple[int, int]:
    """A stride as a number of units, and the numbers of a unit, which a kernel has as a constant.

    Triton knows of an argument whether it is a multiple of 16, and no more. Rows of 1,544 numbers
    begin at whole 16 bytes, but by their stride alone it would load each number by itself.
    """
    return (stride // _UNIT, _UNIT) if stride % _UNIT == 0 else (stride, 1)
