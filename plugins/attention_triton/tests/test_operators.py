"""Packed and paged attention as functions: what they declare.

Their numbers are compared in nanovllm-flash-attn-compat, whose functions call them.
"""

from __future__ import annotations

import torch

from nanovllm_attention_triton import operators


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
