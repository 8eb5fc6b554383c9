"""A mixture of experts, computed in three orders with one result, on one screen of plain torch.

    python examples/moe.py

A router chooses a few experts for each token. An expert is a small gated MLP, and a token's result
is the weighted sum of its experts' results. The pairs (token, expert) can be computed in any order.
The order decides how often weights are read, and a step of few tokens waits for little else.
docs/moe.md has the arithmetic.

Shape suffixes: T tokens, N experts, C experts of a token, E hidden size, F intermediate size,
R rows, which are pairs of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import silu


def route(logits_TN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights [T, C] and ids [T, C] of each token's experts: softmax, the best, renormalised."""
    # Stable: of equal ones the first, so that every device chooses the same.
    best_TN, ids_TN = logits_TN.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights_TC = best_TN[:, :top_k]
    return weights_TC / weights_TC.sum(dim=-1, keepdim=True), ids_TN[:, :top_k]


def expert(x_RE: Tensor, gate_up_2FE: Tensor, down_EF: Tensor) -> Tensor:
    """One expert's result for its rows."""
    gate_RF, up_RF = (x_RE @ gate_up_2FE.T).chunk(2, dim=-1)
    return (silu(gate_RF) * up_RF) @ down_EF.T


def pair_by_pair(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor
) -> tuple[Tensor, int]:
    """[T, E], and how often an expert was read. Nothing is sorted: each pair reads its expert."""
    out_TE = torch.zeros_like(x_TE)
    for token, ids_C in enumerate(ids_TC.tolist()):
        for i, index in enumerate(ids_C):  # a fixed order, so that the sum has the same bits
            y_1E = expert(x_TE[token, None], gate_up_N2FE[index], down_NEF[index])
            out_TE[token] += weights_TC[token, i] * y_1E[0]
    return out_TE, ids_TC.numel()


def runs(ids_TC: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each touched expert with its pairs [R], numbered token * C + i, in the order of tokens."""
    ids_P = ids_TC.flatten()
    order_P = ids_P.argsort(stable=True)  # on a GPU a counting sort: one pass over the ids
    touched, counts = ids_P.unique(return_counts=True)  # both in the order of expert ids
    yield from zip(touched.tolist(), order_P.split(counts.tolist()), strict=True)


def in_tiles(
    x_TE: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_N2FE: Tensor,
    down_NEF: Tensor,
    tile: int,
) -> tuple[Tensor, int]:
    """The same, sorted by expert: each tile of at most `tile` rows of an expert reads it once."""
    num_chosen = ids_TC.shape[1]
    y_PE = x_TE.new_empty(ids_TC.numel(), x_TE.shape[1])
    reads = 0
    for index, pairs_R in runs(ids_TC):
        for pairs in pairs_R.split(tile):
            x_RE = x_TE[pairs // num_chosen]  # a token's row is gathered for each of its pairs
            y_PE[pairs] = expert(x_RE, gate_up_N2FE[index], down_NEF[index])
            reads += 1
    y_TCE = y_PE.unflatten(0, (-1, num_chosen))
    return (y_TCE * weights_TC.unsqueeze(-1)).sum(dim=1), reads  # each token's C in a fixed order


def main() -> None:
    torch.manual_seed(0)
    num_experts, top_k, hidden, intermediate, tile = 32, 4, 64, 48, 16
    gate_up_N2FE = torch.randn(num_experts, 2 * intermediate, hidden) / hidden**0.5
    down_NEF = torch.randn(num_experts, hidden, intermediate) / intermediate**0.5
    kib = 2 * (gate_up_N2FE[0].numel() + down_NEF[0].numel()) / 1024  # one expert in bfloat16
    table = Table(title=f"{num_experts} experts, {top_k} for each token; KiB of weights read")
    for name in (
        "tokens",
        "touched",
        "expected",
        "pairs",
        "sorted",
        f"tiles of {tile}",
        "differ",
    ):
        table.add_column(name, justify="right")
    for num_tokens in (1, 4, 16, 64, 256):
        x_TE = torch.randn(num_tokens, hidden)
        weights_TC, ids_TC = route(torch.randn(num_tokens, num_experts), top_k)
        inputs = x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF
        by_pair, pairs = pair_by_pair(*inputs)
        by_expert, touched = in_tiles(*inputs, tile=num_tokens)  # no expert has more rows
        by_tile, tiles = in_tiles(*inputs, tile=tile)
        expected = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)  # all equally likely
        differ = max((other - by_pair).abs().max() for other in (by_expert, by_tile))
        read = [f"{reads * kib:,.0f}" for reads in (pairs, touched, tiles)]
        table.add_row(f"{num_tokens}", f"{touched}", f"{expected:.1f}", *read, f"{differ:.0e}")
    Console().print(table)


if __name__ == "__main__":
    main()
