"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) over KV blocks, on one screen of plain torch.

    python examples/flash_attention.py

Causal attention of one head of one sequence, which never writes the scores of all queries and keys
to memory. The kernels of nanovllm-attention-triton do the same, with many programs at once.

Shape suffixes: T queries, L keys, D head size, N blocks, P tokens per block, Q queries of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(
    q_TD: Tensor, k_NPD: Tensor, v_NPD: Tensor, block_table: Tensor, num_keys: int, tile: int = 64
) -> Tensor:
    """The queries are the last T of `num_keys` positions; `block_table` [M] names their blocks."""
    num_queries, head_size = q_TD.shape
    block_size = k_NPD.shape[1]
    out_TD = torch.empty_like(q_TD)
    for first in range(0, num_queries, tile):  # tiles of queries know nothing of each other
        q_QD = q_TD[first : first + tile] * head_size**-0.5  # the scale, once
        position_Q = num_keys - num_queries + first + torch.arange(len(q_QD))
        # All that is kept of the softmax so far: its largest score, the sum of the weights
        # exp(score - largest), and the values mixed with these weights, not yet divided by the sum.
        largest_Q1 = torch.full((len(q_QD), 1), -torch.inf, dtype=q_TD.dtype)
        sum_Q1 = torch.zeros(len(q_QD), 1, dtype=q_TD.dtype)
        mixed_QD = torch.zeros_like(q_QD)
        last = int(position_Q[-1])  # no query of this tile may look further
        for index in range(last // block_size + 1):
            block = block_table[index]  # where these keys really lie
            used = min(block_size, num_keys - index * block_size)  # the rest may hold anything
            k_PD, v_PD = k_NPD[block, :used], v_NPD[block, :used]
            key_P = index * block_size + torch.arange(used)
            scores_QP = q_QD @ k_PD.T
            scores_QP = scores_QP.masked_fill(key_P > position_Q[:, None], -torch.inf)
            # A larger score than before makes all earlier weights smaller by the same factor.
            new_Q1 = torch.maximum(largest_Q1, scores_QP.amax(1, keepdim=True))
            shrink_Q1 = torch.exp(largest_Q1 - new_Q1)
            weights_QP = torch.exp(scores_QP - new_Q1)
            sum_Q1 = sum_Q1 * shrink_Q1 + weights_QP.sum(1, keepdim=True)
            mixed_QD = mixed_QD * shrink_Q1 + weights_QP @ v_PD
            largest_Q1 = new_Q1
        out_TD[first : first + tile] = mixed_QD / sum_Q1  # one division, when all keys are seen
    return out_TD


def naive_attention(q_TD: Tensor, k_LD: Tensor, v_LD: Tensor) -> Tensor:
    """The text book's: all scores [T, L] at once."""
    num_queries, num_keys = len(q_TD), len(k_LD)
    scores_TL = q_TD @ k_LD.T * q_TD.shape[1] ** -0.5
    seen_TL = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    return scores_TL.masked_fill(~seen_TL, -torch.inf).softmax(1) @ v_LD


def main() -> None:
    torch.manual_seed(0)
    num_keys, num_queries, head_size, block_size = 1000, 300, 64, 16
    k_NPD, v_NPD = torch.randn(2, 100, block_size, head_size).unbind()
    block_table = torch.randperm(100)[: -(-num_keys // block_size)]  # scattered, in any order
    q_TD = torch.randn(num_queries, head_size)
    out_TD = flash_attention(q_TD, k_NPD, v_NPD, block_table, num_keys)
    k_LD, v_LD = (blocks[block_table].flatten(0, 1)[:num_keys] for blocks in (k_NPD, v_NPD))
    difference = (out_TD - naive_attention(q_TD, k_LD, v_LD)).abs().max()
    print(f"largest difference to naive attention: {difference:.1e}")
    print(f"scores at once: {num_queries * num_keys:,} naive, {64 * block_size:,} here")


if __name__ == "__main__":
    main()
