"""FlashAttention-3: `flash_attn_interface`, built from source. Unverified on hardware."""

from __future__ import annotations

from typing import Any

from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from nanovllm_attention_flash.adapters.base import AttentionRules, DecodeBatch, PrefillBatch


class FlashAttention3:
    """Calls of `flash_attn_with_kvcache`: FA3's varlen function takes no block table."""

    def __init__(self, rules: AttentionRules) -> None:
        self.scale, self.options = rules.scale, rules.options()

    def prefill(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Varlen prefill over blocks."""
        chunks = {"cu_seqlens_q": batch.query_starts, "max_seqlen_q": batch.max_query_len}
        return self._attend(q_THD, k_cache, v_cache, batch, **chunks)

    def decode(self, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: DecodeBatch) -> Tensor:
        """Decode over blocks as a batch of one query each."""
        return self._attend(q_BHD.unsqueeze(1), k_cache, v_cache, batch).squeeze(1)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PrefillBatch | DecodeBatch,
        **chunks: Any,
    ) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=batch.key_lens,
            page_table=batch.block_table,
            softmax_scale=self.scale,
            causal=True,
            **self.options,
            **chunks,
        )
        return out
