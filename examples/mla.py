"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) on one screen of plain torch.

    python examples/mla.py

The cache holds one row per token for all heads: latent numbers, from which each head's key and
value are made by a matrix, and rotated numbers, which carry the position. Un-absorbed, keys and
values are made first. Absorbed, the matrices move to the query and behind the sum, because
q · (W c) equals (Wᵀ q) · c, and the rows of the cache are attended to as they are. docs/moe.md has
the arithmetic.

Shape suffixes: T queries, K keys, H heads, N key size without position, X rotated size, D = N + X,
V value size, L latent size, R = L + X. The queries are the last T of K positions.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, einsum


def weights_of(scores_THK: Tensor) -> Tensor:
    """The causal softmax."""
    num_queries, _, num_keys = scores_THK.shape
    seen_TK = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return scores_THK.masked_fill(~seen_TK[:, None], -torch.inf).softmax(dim=-1)


def unabsorbed(
    q_THN: Tensor, rotated_THX: Tensor, rows_KR: Tensor, w_k_HNL: Tensor, w_v_HVL: Tensor
) -> Tensor:
    """Attention [T, H, V] over cache rows [K, R]: every head's keys and values are made."""
    latent_KL, position_KX = rows_KR.split([w_k_HNL.shape[2], rotated_THX.shape[2]], dim=1)
    nope_KHN = einsum("kl,hnl->khn", latent_KL, w_k_HNL)
    v_KHV = einsum("kl,hvl->khv", latent_KL, w_v_HVL)
    scores_THK = einsum("thn,khn->thk", q_THN, nope_KHN)
    scores_THK += einsum("thx,kx->thk", rotated_THX, position_KX)  # the same for all heads
    scale = (q_THN.shape[2] + rotated_THX.shape[2]) ** -0.5
    return einsum("thk,khv->thv", weights_of(scores_THK * scale), v_KHV)


def absorbed(
    q_THN: Tensor, rotated_THX: Tensor, rows_KR: Tensor, w_k_HNL: Tensor, w_v_HVL: Tensor
) -> Tensor:
    """The same. A row is the key of all heads, and its first L numbers are the value."""
    q_THR = torch.cat([einsum("thn,hnl->thl", q_THN, w_k_HNL), rotated_THX], dim=2)
    # The scale is still that of D numbers, although R are multiplied.
    scale = (q_THN.shape[2] + rotated_THX.shape[2]) ** -0.5
    weights_THK = weights_of(einsum("thr,kr->thk", q_THR, rows_KR) * scale)
    out_THL = einsum("thk,kl->thl", weights_THK, rows_KR[:, : w_k_HNL.shape[2]])
    return einsum("thl,hvl->thv", out_THL, w_v_HVL)


def flops(
    queries: int, keys: int, heads: int, nope: int, rotated: int, value: int, latent: int
) -> tuple[int, int]:
    """Of `unabsorbed` and of `absorbed`: their products, and attention where the mask is open."""
    seen = queries * (2 * keys - queries + 1) // 2
    products = 2 * heads * (nope + value) * latent  # for each key, or for each query
    apart = products * keys + 2 * heads * seen * (nope + rotated + value)
    return apart, products * queries + 2 * heads * seen * (2 * latent + rotated)


def main() -> None:
    torch.manual_seed(0)
    sizes = heads, nope, rotated, value, latent = 16, 128, 64, 128, 512  # DeepSeek-V2-Lite
    w_k_HNL = torch.randn(heads, nope, latent, dtype=torch.float64) / latent**0.5
    w_v_HVL = torch.randn(heads, value, latent, dtype=torch.float64) / latent**0.5
    row = 2 * (latent + rotated)  # bytes in bfloat16
    apart = 2 * heads * (nope + rotated + value)
    table = Table(title=f"One layer. A token in the cache: {row:,} bytes; apart {apart:,}")
    for name in ("queries", "keys", "MFLOP un-absorbed", "absorbed", "difference"):
        table.add_column(name, justify="right")
    for queries, keys in ((1, 600), (64, 600), (200, 600), (600, 600)):
        q_THD = torch.randn(queries, heads, nope + rotated, dtype=torch.float64)
        rows_KR = torch.randn(keys, latent + rotated, dtype=torch.float64)
        inputs = *q_THD.split([nope, rotated], dim=2), rows_KR, w_k_HNL, w_v_HVL
        difference = (unabsorbed(*inputs) - absorbed(*inputs)).abs().max()
        cost = (f"{number / 1e6:,.0f}" for number in flops(queries, keys, *sizes))
        table.add_row(f"{queries}", f"{keys}", *cost, f"{difference:.0e}")
    Console().print(table)


if __name__ == "__main__":
    main()
