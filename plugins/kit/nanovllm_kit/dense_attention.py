"""The simplest attention runtime: blocks in order, softmax in float32, one sequence at a time.

It runs a model without an engine, as a reference for engines and backends and to test models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nanovllm_core.layers import (
    Attention,
    AttentionLayer,
    AttentionRuntime,
    LatentAttention,
)

_BLOCK_SIZE = 16


class DenseRuntime(AttentionRuntime):
    """Runs every attention layer of a model over its own KV cache of sequences of up to `max_len`.

    Calls continue a sequence: tokens are stored at their positions, and each attends to all
    positions up to its own. All tokens belong to sequence 0 unless `set_batch` says otherwise.
    Latent attention computes keys and values of every token that is seen, and absorbs nothing.
    """

    def __init__(self, model: nn.Module, max_len: int, num_sequences: int = 1) -> None:
        self.blocks_per_sequence = -(-max_len // _BLOCK_SIZE)
        self.batch: Sequence[tuple[int, int]] | None = None
        self.caches: list[list[Tensor]] = []
        for module in model.modules():
            if isinstance(module, AttentionLayer):
                shape, context = module.shape, module.context
                num_blocks = num_sequences * self.blocks_per_sequence
                size = (num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
                module.bind(self, len(self.caches))
                self.caches.append(
                    [
                        torch.zeros(size, dtype=context.dtype, device=context.device)
                        for _ in range(shape.rows_per_token)
                    ]
                )

    def set_batch(self, batch: Sequence[tuple[int, int]]) -> None:
        """The (sequence, number of tokens) pairs that the next forward pass packs, in order."""
        self.batch = batch

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v of one layer -> [T, H·D]; see `nanovllm_core.layers.AttentionRuntime`."""
        k_cache, v_cache = self.caches[layer.layer_index]
        slots_T = self.slots(positions_T)
        q_THD = layer.context.kernels.prepare_qkv(
            qkv_TX, layer.prep, positions_T, slots_T, k_cache, v_cache
        )
        return self.attend_prepared(layer, q_THD, positions_T)

    def attend_latent(
        self, layer: LatentAttention, q_THD: Tensor, rows_TR: Tensor, positions_T: Tensor
    ) -> Tensor:
        """Queries and rows of one layer -> [T, H·V]."""
        (rows,) = self.caches[layer.layer_index]
        q_THD = layer.context.kernels.prepare_latent(
            q_THD, rows_TR, layer.prep, positions_T, self.slots(positions_T), rows.squeeze(2)
        )
        return self.attend_prepared(layer, q_THD, positions_T)

    def slots(self, positions_T: Tensor) -> Tensor:
        """Where tokens are stored; int64."""
        starts, counts = self._sequences(positions_T)
        first_slots = torch.tensor(starts).repeat_interleave(torch.tensor(counts))
        return positions_T.long() + first_slots.to(positions_T.device)

    def attend_prepared(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Queries whose keys and values are stored -> [T, H·V]."""
        starts, counts = self._sequences(positions_T)
        outputs = []
        for q_part, positions, start in zip(
            q_THD.split(counts), positions_T.split(counts), starts, strict=True
        ):
            keys_S = torch.arange(int(positions.max()) + 1, device=positions.device)
            outputs.append(self._attend_one(layer, q_part, positions, keys_S, start))
        return torch.cat(outputs).flatten(1).to(q_THD.dtype)

    def _sequences(self, positions_T: Tensor) -> tuple[list[int], list[int]]:
        """The first slot of each sequence of the batch, and how many tokens it has there."""
        batch = self.batch or [(0, len(positions_T))]
        starts = [sequence * self.blocks_per_sequence * _BLOCK_SIZE for sequence, _ in batch]
        return starts, [count for _, count in batch]

    def _attend_one(
        self,
        layer: AttentionLayer,
        q_THD: Tensor,
        positions_T: Tensor,
        keys_S: Tensor,
        start: int = 0,
    ) -> Tensor:
        """One sequence's queries over its S tokens from slot `start` on, in float32.

        `keys_S` are the positions of these tokens.
        """
        caches = self.caches[layer.layer_index]
        stored = [cache.flatten(0, 1)[start : start + len(keys_S)] for cache in caches]
        shape = layer.shape
        k_SHD, v_SHV = self._keys_and_values(layer, stored)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD.float()) * layer.scale
        if shape.soft_cap is not None:
            scores_HTS = shape.soft_cap * torch.tanh(scores_HTS / shape.soft_cap)
        distance_TS = positions_T[:, None].long() - keys_S.long()
        hidden_TS = distance_TS < 0
        if shape.sliding_window is not None:
            hidden_TS |= distance_TS >= shape.sliding_window
        weights_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf")).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHV.float())

    def _keys_and_values(
        self, layer: AttentionLayer, stored: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Those of all query heads, [S, H, D] and [S, H, V], from the slots of S tokens."""
        if isinstance(layer, LatentAttention):
            return layer.expand_rows(stored[0].squeeze(1))
        group = layer.shape.num_heads // layer.shape.num_kv_heads
        k_SHD, v_SHV = (cache.repeat_interleave(group, dim=1) for cache in stored)
        return k_SHD, v_SHV


class AbsorbedRuntime(DenseRuntime):
    """The same for models with latent attention alone, computed as an engine's decode steps do.

    Projections are absorbed: one cached row of a token is the key and the value of all heads.
    """

    def attend_prepared(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        latent = cast(LatentAttention, layer)
        out_TX = super().attend_prepared(layer, latent.absorb(q_THD), positions_T)
        out_THL = out_TX.unflatten(-1, (layer.shape.num_heads, -1))
        return latent.expand_output(out_THL).flatten(1)

    def _keys_and_values(
        self, layer: AttentionLayer, stored: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        rows_SHR = stored[0].expand(-1, layer.shape.num_heads, -1)
        return rows_SHR, rows_SHR[..., : cast(LatentAttention, layer).config.kv_lora_rank]


class SparseRuntime(DenseRuntime):
    """The same for one sequence of which only some positions are there, in increasing order.

    So a few tokens reach the far end of a long context. `positions_S` are those of all its tokens.
    """

    def __init__(self, model: nn.Module, positions_S: Tensor) -> None:
        super().__init__(model, len(positions_S))
        self.positions_S = positions_S

    def slots(self, positions_T: Tensor) -> Tensor:
        """Tokens lie in the cache in their order."""
        return torch.searchsorted(self.positions_S, positions_T.to(self.positions_S.dtype))

    def attend_prepared(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Tokens see what is at positions up to their own."""
        keys_S = self.positions_S[: int(self.slots(positions_T).max()) + 1]
        out_THV = self._attend_one(layer, q_THD, positions_T, keys_S)
        return out_THV.flatten(1).to(q_THD.dtype)
