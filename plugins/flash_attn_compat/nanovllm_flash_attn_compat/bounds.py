"""Lengths and block ids that lie outside what the tensors hold: refused where they can be seen.

The host sees tensors on a CPU. It does not look at those on a GPU, which would make every call wait
for the device; lengths are cut there to what fits. Inside `debug()` it looks at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import refuse

_debugging = 0


@contextmanager
def debug() -> Iterator[None]:
    """Inside, lengths and block ids on a GPU are read and refused as those on a CPU are.

    For finding a bug: each call waits for the device, and none can be captured. Holds for all
    threads.
    """
    global _debugging
    _debugging += 1
    try:
        yield
    finally:
        _debugging -= 1


def host_sees(x: Tensor) -> bool:
    """Whether the host looks at the values of a tensor."""
    return _debugging > 0 or x.device.type == "cpu"


def check_starts(
    starts: Tensor, tokens: int, longest: int, function: str, parameter: str, remedy: str
) -> Tensor:
    """Running sums of lengths [S + 1]: none beyond `tokens`, no length beyond `longest`."""
    if not host_sees(starts):
        return starts
    starts = check(starts, starts, tokens, function, parameter, "sequences end within the tensor")
    return check(starts, starts.diff(), longest, function, parameter, remedy)


def check_blocks(
    block_table: Tensor,
    lens: Tensor,
    block_size: int,
    num_blocks: int,
    function: str,
    parameter: str,
) -> Tensor:
    """`block_table` [B, M], whose entries in use name blocks that exist."""
    first = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    used = torch.where(first < lens[:, None], block_table, 0)
    remedy = "name blocks of the cache"
    return check(block_table, used, num_blocks - 1, function, parameter, remedy)


def check(
    x: Tensor, values: Tensor, most: int, function: str, parameter: str, remedy: str
) -> Tensor:
    """`x`, where none of `values` is negative or above `most` as far as the host sees.

    Raises UnsupportedError for the first parameter of `function` that is.
    """
    if not host_sees(values):
        return x
    checked: Tensor = _checked(x, values, most, function, parameter, remedy)
    return checked


# An operator, for a traced function cannot read values. Numbers come as numbers: as a part of
# `remedy` each would be compiled for by itself.
@torch.library.custom_op("nanovllm_flash_attn_compat::checked", mutates_args=())
def _checked(
    x: Tensor, values: Tensor, most: int, function: str, parameter: str, remedy: str
) -> Tensor:
    if values.numel():
        least, largest = (int(bound) for bound in values.aminmax())
        if least < 0 or largest > most:
            wrong = least if least < 0 else largest
            refuse(function, parameter, wrong, f"values lie in 0 to {most}; {remedy}")
    return x.clone()


@_checked.register_fake
def _(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)
