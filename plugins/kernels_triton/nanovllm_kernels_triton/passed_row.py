"""A row that passes from the programs of one kernel to those of the next, before the first ends.

A kernel that waits for the one before waits until all of its programs have ended and what they
wrote is seen by all: a microsecond, in which memory and multiprocessors have nothing to do. Here
each program of a product stores its numbers in a row apart too, and the programs of the next kernel
poll that row instead of waiting. The numbers are their own flags: the row holds none before, and
the kernel after the next takes them out again. All programs of the first kernel have begun when the
second starts, so a program that polls keeps none of them from its place.

Of half precision, and of one row: the more there is to poll, the less is saved.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EMPTY_HALF = tl.constexpr(-1)
"""The bits of a NaN, in float16 and bfloat16, that is never passed: it passes as another."""
_NAN_HALF = tl.constexpr(0x7FFF)


@triton.jit
def pass_numbers(row_ptr, places, y, mask, DTYPE: tl.constexpr):
    """Some numbers of the row, rounded to its dtype."""
    bits = y.to(DTYPE).to(tl.int16, bitcast=True)
    tl.store(row_ptr + places, tl.where(bits == EMPTY_HALF, _NAN_HALF, bits), mask=mask)


@triton.jit
def poll_row(row_ptr, columns, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """The row, once all of it has passed; 0 beside it."""
    inside = columns < SIZE
    bits = tl.load(row_ptr + columns, mask=inside, other=0, volatile=True)
    while tl.max((bits == EMPTY_HALF).to(tl.int32), axis=0) != 0:
        bits = tl.load(row_ptr + columns, mask=inside, other=0, volatile=True)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def take_out_numbers(row_ptr, places, mask):
    """Some places of the row are empty again."""
    tl.store(row_ptr + places, tl.full(places.shape, EMPTY_HALF, tl.int16), mask=mask)


def empty_row(size: int, device: torch.device) -> Tensor:
    """The memory in which a row of so many numbers passes, int16, of one product."""
    return torch.full((size,), EMPTY_HALF.value, dtype=torch.int16, device=device)


class PassedRows:
    """The rows that pass from products to the mixtures behind them; each product has its own."""

    def __init__(self) -> None:
        self._of_weights: dict[int, tuple[int, Tensor]] = {}
        """By the address of a product's weight, that of the router which polls its row."""
        self._under_way: tuple[int, int, Tensor] | None = None
        """The addresses of a router and of x, and the row that this x passes through."""

    def announce(self, weight_EF: Tensor, weight_NE: Tensor) -> None:
        """The sum of this product passes to the mixture with this router."""
        if weight_EF.dtype.itemsize == 2:
            row = empty_row(len(weight_EF), weight_EF.device)
            self._of_weights[weight_EF.data_ptr()] = weight_NE.data_ptr(), row

    def begin(self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor) -> Tensor | None:
        """The row through which the product's sum passes; None: it is not announced, or not one."""
        self._take_out()
        announced = self._of_weights.get(weight_EF.data_ptr())
        if len(x_TF) != 1 or announced is None:
            return None
        router, row = announced
        self._under_way = router, residual_TE.data_ptr(), row
        return row

    def end(self, x_TE: Tensor, weight_NE: Tensor, *, is_taken: bool) -> Tensor | None:
        """The row through which this x passes to this router, if it does and is taken."""
        if self._under_way is not None:
            *addresses, row = self._under_way
            if is_taken and addresses == [weight_NE.data_ptr(), x_TE.data_ptr()]:
                self._under_way = None
                return row
        self._take_out()
        return None

    def _take_out(self) -> None:
        """Empty the row that no mixture has taken."""
        if self._under_way is not None:
            self._under_way[2].fill_(EMPTY_HALF.value)
            self._under_way = None
