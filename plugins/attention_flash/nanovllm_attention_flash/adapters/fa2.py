"""flash-attn 2: `flash_attn`, compiled when it is installed. Unverified on hardware."""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanovllm_attention_flash.adapters.base import AttentionRules, DecodeBatch, PrefillBatch


class FlashAttention2:
    """Calls of `flash_attn_varlen_func` and `flash_attn_with_kvcache`, blocks of 256 tokens."""

    def __init__(self, rules: AttentionRules) -> None:
        self.scale, self.options = rules.scale, rules.options()

    def prefill(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Varlen prefill over blocks; key lengths are the differences of `cu_seqlens_k`."""
        out: Tensor = flash_attn_varlen_func(
            q_THD,
            k_cache,
            v_cache,
            batch.query_starts,
            batch.key_starts,
            batch.max_query_len,
            batch.max_key_len,
            softmax_scale=self.scale,
            causal=True,
            **self.options,
            block_table=batch.block_table,
        )
        return out

    def decode(self, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: DecodeBatch) -> Tensor:
        """Decode over blocks, split over the context as flash-attn chooses."""
        out: Tensor = flash_attn_with_kvcache(
            q_BHD.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=batch.key_lens,
            block_table=batch.block_table,
            softmax_scale=self.scale,
            causal=True,
            **self.options,
        )
        return out.squeeze(1)
