"""FlashAttention-4: `flash_attn.cute`, written in Python and compiled at its first call.

Verified on an H200 with flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

from typing import cast

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from nanovllm_attention_flash.adapters.base import AttentionRules, DecodeBatch, PrefillBatch


class FlashAttention4:
    """Calls of `flash_attn.cute.flash_attn_varlen_func`, which returns (out, lse or None)."""

    def __init__(self, rules: AttentionRules) -> None:
        self.scale = rules.scale

    def prefill(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Varlen prefill over blocks."""
        out, _ = flash_attn_varlen_func(
            q_THD,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.query_starts,
            # The kernel is compiled anew for chunks that fit one tile. A bound that is the same in
            # every step keeps one kernel, and no step waits seconds for another.
            max_seqlen_q=batch.most_queries,
            max_seqlen_k=batch.max_key_len,
            seqused_k=batch.key_lens,
            page_table=batch.block_table,
            softmax_scale=self.scale,
            causal=True,
        )
        return cast(Tensor, out)

    def decode(self, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: DecodeBatch) -> Tensor:
        """Decode over blocks as a batch of one query each, which needs no varlen scheduling.

        A row without keys would make the kernel read the block table one entry before the row
        (flash_fwd_sm90.py, n_block = n_block_max - 1), so padded rows attend to one key.
        """
        out, _ = flash_attn_varlen_func(
            q_BHD.unsqueeze(1),
            k_cache,
            v_cache,
            max_seqlen_q=1,
            max_seqlen_k=batch.max_key_len,
            seqused_k=batch.key_lens_from_1,
            page_table=batch.block_table,
            softmax_scale=self.scale,
            causal=False,
        )
        return cast(Tensor, out.squeeze(1))
