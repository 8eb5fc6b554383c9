"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) on one screen of plain torch.

    python examples/mla.py

The cache holds one row per token for all heads: C latent numbers, from which each head's key and
value are made by a matrix, and R numbers that carry the position. Un-absorbed, keys and values are
made first. Absorbed, the matrices move to the query and behind the sum, because q · (W c) equals
(Wᵀ q) · c, and the rows of the cache are attended to as they are.

Shape suffixes: T queries, L keys, H heads, D key size without position, R rotated size, V value
size, C latent size. The queries are the last T of L positions.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, einsum


def weights_of(scores_THL: Tensor) -> Tensor:
    """The causal softmax."""
    num_queries, _, num_keys = scores_THL.shape
    seen_TL = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return scores_THL.masked_fill(~seen_TL[:, None], -torch.inf).softmax(dim=-1)


def unabsorbed(
    q_THD: Tensor, rotated_THR: Tensor, row_LX: Tensor, w_uk_HDC: Tensor, w_uv_HVC: Tensor
) -> Tensor:
    """Attention [T, H, V] over cache rows [L, C + R]: every head's keys and values are made."""
    latent_LC, position_LR = row_LX.split([w_uk_HDC.shape[2], rotated_THR.shape[2]], dim=1)
    k_LHD = einsum("lc,hdc->lhd", latent_LC, w_uk_HDC)
    v_LHV = einsum("lc,hvc->lhv", latent_LC, w_uv_HVC)
    scores_THL = einsum("thd,lhd->thl", q_THD, k_LHD)
    scores_THL += einsum("thr,lr->thl", rotated_THR, position_LR)  # the same for all heads
    scale = (q_THD.shape[2] + rotated_THR.shape[2]) ** -0.5
    return einsum("thl,lhv->thv", weights_of(scores_THL * scale), v_LHV)


def absorbed(
    q_THD: Tensor, rotated_THR: Tensor, row_LX: Tensor, w_uk_HDC: Tensor, w_uv_HVC: Tensor
) -> Tensor:
    """The same. A row is the key of all heads, and its first C numbers are the value."""
    q_THX = torch.cat([einsum("thd,hdc->thc", q_THD, w_uk_HDC), rotated_THR], dim=2)
    # The scale is still that of the key size D + R, although C + R numbers are multiplied.
    scale = (q_THD.shape[2] + rotated_THR.shape[2]) ** -0.5
    weights_THL = weights_of(einsum("thx,lx->thl", q_THX, row_LX) * scale)
    mixed_THC = einsum("thl,lc->thc", weights_THL, row_LX[:, : w_uk_HDC.shape[2]])
    return einsum("thc,hvc->thv", mixed_THC, w_uv_HVC)


def flops(
    queries: int, keys: int, heads: int, key: int, rotated: int, value: int, latent: int
) -> tuple[int, int]:
    """Of `unabsorbed` and of `absorbed`: their products, and attention where the mask is open."""
    seen = queries * (2 * keys - queries + 1) // 2
    products = 2 * heads * (key + value) * latent  # for each key, or for each query
    apart = products * keys + 2 * heads * seen * (key + rotated + value)
    return apart, products * queries + 2 * heads * seen * (2 * latent + rotated)


def main() -> None:
    torch.manual_seed(0)
    heads, key, rotated, value, latent = 16, 128, 64, 128, 512  # DeepSeek-V2-Lite
    w_uk_HDC = torch.randn(heads, key, latent, dtype=torch.float64) / latent**0.5
    w_uv_HVC = torch.randn(heads, value, latent, dtype=torch.float64) / latent**0.5
    row = 2 * (latent + rotated)  # bytes in bfloat16
    apart = 2 * heads * (key + rotated + value)
    table = Table(title=f"One layer. A token in the cache: {row:,} bytes; apart {apart:,}")
    for name in ("queries", "keys", "MFLOP un-absorbed", "absorbed", "difference"):
        table.add_column(name, justify="right")
    for queries, keys in ((1, 600), (64, 600), (200, 600), (600, 600)):
        q_THX = torch.randn(queries, heads, key + rotated, dtype=torch.float64)
        row_LX = torch.randn(keys, latent + rotated, dtype=torch.float64)
        inputs = *q_THX.split([key, rotated], dim=2), row_LX, w_uk_HDC, w_uv_HVC
        difference = (unabsorbed(*inputs) - absorbed(*inputs)).abs().max()
        cost = (f"{n / 1e6:,.0f}" for n in flops(queries, keys, heads, key, rotated, value, latent))
        table.add_row(f"{queries}", f"{keys}", *cost, f"{difference:.0e}")
    Console().print(table)


if __name__ == "__main__":
    main()
