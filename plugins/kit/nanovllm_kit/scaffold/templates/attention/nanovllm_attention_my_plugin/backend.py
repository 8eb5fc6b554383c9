"""Paged attention in plain torch: gather a sequence's blocks, then the textbook formula.

It says what the contract means and is not fast. Replace `_attend` by your kernel; the tests tell
whether it still computes the same.

Shape suffixes: B decode rows, T packed tokens, Q queries and L keys of one sequence, H query heads,
K KV heads, G query heads per KV head, D head size, N blocks, P tokens per block, M blocks at most.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from nanovllm_core.api import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    PrefillMetadata,
    UnsupportedError,
)
from pydantic import BaseModel
from torch import Tensor

from nanovllm_attention_my_plugin.plugin import MyPluginOptions


class MyPluginBackend(AttentionBackend):
    """One instance serves all layers with the same heads, window, soft cap and scale."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        name = cast(MyPluginOptions, options).compute
        self._compute: torch.dtype = getattr(torch, name)

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        """Called once per step, before the layers."""
        if metadata.query_len != 1:
            raise UnsupportedError(
                f"decode steps of {metadata.query_len} queries per row are not supported, only of 1"
            )

    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        """One query per row, the last position of its sequence. A row of length 0 is padding."""
        for row, num_keys in enumerate(metadata.seq_lens.tolist()):
            if num_keys:
                blocks_M = metadata.block_table[row]
                one = slice(row, row + 1)
                out_BHD[one] = self._attend(q_BHD[one], k_cache, v_cache, blocks_M, num_keys)

    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        """Chunks of prompts, packed; the queries of a chunk are the last of its sequence."""
        bounds = pairwise(metadata.query_start_loc.tolist())
        seq_lens = metadata.seq_lens.tolist()
        for row, ((start, stop), num_keys) in enumerate(zip(bounds, seq_lens, strict=True)):
            if start < stop:
                blocks_M = metadata.block_table[row]
                chunk = slice(start, stop)
                out_THD[chunk] = self._attend(q_THD[chunk], k_cache, v_cache, blocks_M, num_keys)

    def _attend(
        self, q_QHD: Tensor, k_cache: Tensor, v_cache: Tensor, blocks_M: Tensor, num_keys: int
    ) -> Tensor:
        """Causal attention of a sequence's last Q positions to all its keys, [Q, H, D]."""
        cap, window, block_size = (
            self.config.soft_cap,
            self.config.sliding_window,
            self.config.block_size,
        )
        num_queries, _, head_size = q_QHD.shape
        skipped = 0
        if window is not None:
            # Blocks wholly before the first query's window may belong to another sequence by now.
            skipped = max(0, num_keys - num_queries - window + 1) // block_size
        used = blocks_M[skipped : -(-num_keys // block_size)].long()
        num_keys -= skipped * block_size
        k_LKD, v_LKD = (
            # The rest of the last block may hold anything, NaN too: cut it off before computing.
            cache_NPKD[used].flatten(0, 1)[:num_keys].to(self._compute)
            for cache_NPKD in (k_cache, v_cache)
        )
        q_QKGD = q_QHD.to(self._compute).reshape(
            num_queries, self.config.num_kv_heads, -1, head_size
        )
        scores_KGQL = torch.einsum("qkgd,lkd->kgql", q_QKGD, k_LKD) * self.config.scale
        if cap is not None:
            scores_KGQL = cap * torch.tanh(scores_KGQL / cap)
        keys_L = torch.arange(num_keys, device=q_QHD.device)
        # The queries are the last positions; what lies after each of them is hidden from it.
        distance_QL = keys_L[num_keys - num_queries :, None] - keys_L
        hidden_QL = distance_QL < 0
        if window is not None:
            hidden_QL |= distance_QL >= window
        scores_KGQL.masked_fill_(hidden_QL, float("-inf"))
        out_QKGD = torch.einsum("kgql,lkd->qkgd", scores_KGQL.softmax(dim=-1), v_LKD)
        return out_QKGD.flatten(1, 2).to(q_QHD.dtype)
