"""torch's own paged `varlen_attn` (torch >= 2.12): nothing to install. Unverified on hardware."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanovllm_attention_flash.adapters.base import AttentionRules, DecodeBatch, PrefillBatch


class TorchVarlen:
    """Calls of `varlen_attn`, which runs flash-attn 2's kernels inside torch, blocks of 256 tokens.

    `num_splits=1`: its split results over blocks have been reported wrong.
    """

    def __init__(self, rules: AttentionRules) -> None:
        self.scale, self.window_size = rules.scale, rules.window_size

    def prefill(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Varlen prefill over blocks."""
        return self._attend(q_THD, k_cache, v_cache, batch, batch.max_query_len)

    def decode(self, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: DecodeBatch) -> Tensor:
        """Decode over blocks as chunks of one query."""
        return self._attend(q_BHD, k_cache, v_cache, batch, 1)

    def _attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PrefillBatch | DecodeBatch,
        max_query_len: int,
    ) -> Tensor:
        out = varlen_attn(
            q_THD,
            k_cache,
            v_cache,
            batch.query_starts,
            None,
            max_query_len,
            batch.max_key_len,
            scale=self.scale,
            window_size=self.window_size,
            enable_gqa=True,
            seqused_k=batch.key_lens,
            block_table=batch.block_table,
            num_splits=1,
        )
        return cast(Tensor, out)  # a pair only where return_aux asks for it
