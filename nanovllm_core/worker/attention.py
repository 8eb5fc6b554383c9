"""Runs a model's attention layers through the chosen backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.layers import Attention
from nanovllm_core.worker.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step as attention sees it: decode tokens first, then packed prompt chunks."""

    slot_mapping: Tensor
    decode: DecodeMetadata | None = None
    prefill: PrefillMetadata | None = None


class PagedAttention:
    """Prepares q, stores k and v, and calls the decode and the prefill backend for their tokens.

    Every attention layer of one model is bound to one of these (`Attention.bind`), so there is no
    global context and two engines live side by side.
    """

    def __init__(
        self,
        kernels: KernelSet,
        prefill_backend: AttentionBackend,
        decode_backend: AttentionBackend,
    ) -> None:
        self.prefill_backend = prefill_backend
        self.decode_backend = decode_backend
        self._kernels = kernels
        self._cache: KVCache | None = None
        self._batch: AttentionBatch | None = None

    def set_cache(self, cache: KVCache) -> None:
        """Use these blocks from now on."""
        self._cache = cache

    def begin_step(self, batch: AttentionBatch) -> None:
        """Plan a step; the layers run next."""
        if batch.decode is not None:
            self.decode_backend.plan_decode(batch.decode)
        if batch.prefill is not None:
            self.prefill_backend.plan_prefill(batch.prefill)
        self._batch = batch

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed qkv of one layer -> attention output [T, num_heads * head_size]."""
        batch, cache = self._batch, self._cache
        if batch is None or cache is None:
            raise RuntimeError("attend() was called outside a step")
        k_cache, v_cache = cache.layer(layer.layer_index)
        q_THD = self._kernels.prepare_qkv(
            qkv_TX, layer.prep, positions_T, batch.slot_mapping, k_cache, v_cache
        )
        out_THD = torch.empty_like(q_THD)
        num_decode = 0
        if batch.decode is not None:
            num_decode = batch.decode.num_rows
            self.decode_backend.run_decode(
                q_THD[:num_decode], k_cache, v_cache, batch.decode, out_THD[:num_decode]
            )
        if batch.prefill is not None:
            self.prefill_backend.run_prefill(
                q_THD[num_decode:], k_cache, v_cache, batch.prefill, out_THD[num_decode:]
            )
        return out_THD.flatten(1)
