"""Packed and paged attention as functions: what they declare.

Their numbers are compared in nanovllm-flash-attn-compat, whose functions call them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm_attention_triton import operators
from nanovllm_core.api import UnsupportedError


def test_the_operators_keep_their_declarations():
    """opcheck: schemas are true, fake kernels match, and tracing with any shape works."""
    q, k, v = torch.randn(5, 4, 24), torch.randn(7, 2, 24), torch.randn(7, 2, 24)
    cu_q, cu_k = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 7]).int()
    for with_lse in (False, True):
        arguments = (q, k, v, cu_q, cu_k, None, 3, 4, 0.1, 2, 0, 1.0, with_lse)
        torch.library.opcheck(operators._packed, arguments)
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([15, 4], dtype=torch.int32)
    k, v = torch.randn(2, 6, 16, 2, 24).unbind()
    for queries in (1, 2):
        q = torch.randn(2, queries, 4, 24)
        arguments = (q, k, v, table, lens, 0.1, -1, 0, 0.0, True, queries == 2)
        torch.library.opcheck(operators._paged, arguments)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_that_is_not_positive_is_refused_by_both(scale: float) -> None:
    """Decode, prefill of blocks, and packed keys alike: by the function's name, with the remedy."""
    x, starts = torch.randn(2, 2, 24), torch.tensor([0, 2], dtype=torch.int32)
    table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    blocks = (x[None], x[None], table, lens)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.packed_attention, (x, x, x, starts, starts, 2, 2)),
        (operators.paged_attention, (x[None], *blocks)),
        (operators.paged_attention, (x[None, :1], *blocks)),
    ]
    for function, arguments in calls:
        message = f"{function.__name__}: scale={scale} .*positive.*negate q"
        with pytest.raises(UnsupportedError, match=message):
            function(*arguments, scale=scale)
