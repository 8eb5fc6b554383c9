"""Prompts of latent attention in steps that no graph holds.

Keys and values are computed from rows, of the context in parts. A chunk's queries attend causally
to the chunk's own tokens, and fully to the context before it: the tokens of earlier chunks and of
cached prefixes. The context of all chunks is packed and cut into parts of bounded size, so that
memory does not grow with it. Each part gives an output and the log-sum-exp of its scores, by which
the outputs are merged (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    PackedMetadata,
    PrefillMetadata,
)
from nanovllm_core.layers import LatentAttention

LEAST_PART = 4096
"""Tokens of context; smaller parts would be more launches than work."""


@dataclass(slots=True)
class _Part:
    """A packed call, and the slots of its keys' rows in the blocks [K], int64."""

    slots: Tensor
    packed: PackedMetadata


class LatentPrompts:
    """The prompt chunks of one latent group; plans once per step, runs once per layer."""

    def __init__(self, backend: AttentionBackend, config: AttentionConfig) -> None:
        self._backend = backend
        self._block_size = config.block_size
        self.part_size = max(LEAST_PART, config.max_num_batched_tokens)
        """The tokens of context that a layer computes keys and values of at once."""

    def plan(self, chunks: PrefillMetadata, num_context: int, slots_T: Tensor) -> None:
        """Lay out the packed calls of a step. `slots_T`: where the chunks' own rows are stored."""
        own = PackedMetadata(
            query_start_loc=chunks.query_start_loc,
            key_start_loc=chunks.query_start_loc,
            max_query_len=chunks.max_query_len,
            max_key_len=chunks.max_query_len,
            causal=True,
        )
        self._own = _Part(slots_T, own)
        self._context = list(self._context_parts(chunks, num_context))
        for part in (self._own, *self._context):
            self._backend.plan_packed(part.packed)

    def _context_parts(self, chunks: PrefillMetadata, num_context: int) -> Iterator[_Part]:
        context_S = chunks.seq_lens - chunks.query_start_loc.diff()
        start_loc = pad(context_S.cumsum(0), (1, 0))
        for first in range(0, num_context, self.part_size):
            end = min(first + self.part_size, num_context)
            index_K = torch.arange(first, end, device=start_loc.device)
            sequence_K = torch.searchsorted(start_loc[1:], index_K, right=True)
            position_K = index_K - start_loc[sequence_K]
            block_K = chunks.block_table[sequence_K, position_K // self._block_size]
            packed = PackedMetadata(
                query_start_loc=chunks.query_start_loc,
                key_start_loc=(start_loc.clamp(first, end) - first).int(),
                max_query_len=chunks.max_query_len,
                max_key_len=min(end - first, chunks.max_seq_len),
                causal=False,
            )
            yield _Part(block_K.long() * self._block_size + position_K % self._block_size, packed)

    def run(self, layer: LatentAttention, q_THD: Tensor, cache_NPR: Tensor) -> Tensor:
        """Prepared queries of the chunks -> outputs [T, H, V]; their rows are in the cache."""
        rows_SR = cache_NPR.flatten(0, 1)
        if not self._context:
            return self._attend(self._own, layer, q_THD, rows_SR, None)
        lse_HT = q_THD.new_empty(q_THD.shape[1::-1], dtype=torch.float32)
        sum_THV = self._attend(self._own, layer, q_THD, rows_SR, lse_HT).float()
        part_lse_HT = torch.empty_like(lse_HT)
        for part in self._context:
            out_THV = self._attend(part, layer, q_THD, rows_SR, part_lse_HT)
            # exp(part) / (exp(part) + exp(before)), which is the part's share.
            share_HT = torch.sigmoid(part_lse_HT - lse_HT)
            sum_THV.lerp_(out_THV.float(), share_HT.T.unsqueeze(-1))
            torch.logaddexp(lse_HT, part_lse_HT, out=lse_HT)
        return sum_THV.to(q_THD.dtype)

    def _attend(
        self,
        part: _Part,
        layer: LatentAttention,
        q_THD: Tensor,
        rows_SR: Tensor,
        lse_HT: Tensor | None,
    ) -> Tensor:
        k_KHD, v_KHV = layer.expand_rows(rows_SR.index_select(0, part.slots))
        out_THV = q_THD.new_empty((*q_THD.shape[:2], v_KHV.shape[-1]))
        self._backend.run_packed(q_THD, k_KHD, v_KHV, part.packed, out_THV, lse_HT)
        return out_THV
