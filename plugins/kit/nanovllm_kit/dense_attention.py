"""The simplest attention runtime: blocks in order, softmax in float32, one sequence at a time.

It runs a model without an engine, as a reference for engines and backends and to test models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from nanovllm_core.layers import Attention, AttentionLayer, LatentAttention

_BLOCK_SIZE = 16


class DenseRuntime:
    """Runs a model's attention layers over KV caches of sequences of up to `max_len` tokens.

    Calls continue a sequence: tokens are stored at their positions, and each attends to all
    positions up to its own. All tokens belong to sequence 0 unless `set_batch` says otherwise.
    """

    def __init__(self, model: nn.Module, max_len: int, num_sequences: int = 1) -> None:
        self.blocks_per_sequence = -(-max_len // _BLOCK_SIZE)
        self.batch: Sequence[tuple[int, int]] | None = None
        self.caches: list[list[Tensor]] = []
        for module in model.modules():
            if isinstance(module, AttentionLayer):
                shape, context = module.shape, module.context
                num_blocks = num_sequences * self.blocks_per_sequence
                row = (shape.head_size,) if shape.latent else (shape.num_kv_heads, shape.head_size)
                sizes = (shape.rows_per_token, num_blocks, _BLOCK_SIZE, *row)
                cache = torch.zeros(sizes, dtype=context.dtype, device=context.device)
                module.bind(self, len(self.caches))
                self.caches.append(list(cache))

    def set_batch(self, batch: Sequence[tuple[int, int]]) -> None:
        """The (sequence, number of tokens) pairs that the next forward pass packs, in order."""
        self.batch = batch

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v of one layer -> [T, H·D]; see `nanovllm_core.layers.AttentionRuntime`."""
        slots_T = self._slots(positions_T)
        caches = self.caches[layer.layer_index]
        q_THD = layer.context.kernels.prepare_qkv(qkv_TX, layer.prep, positions_T, slots_T, *caches)
        return self._attend(layer, q_THD, positions_T)

    def attend_latent(
        self, layer: LatentAttention, q_THD: Tensor, rows_TR: Tensor, positions_T: Tensor
    ) -> Tensor:
        """Queries and rows of one layer -> [T, H·V], with keys and values computed from rows."""
        slots_T = self._slots(positions_T)
        caches = self.caches[layer.layer_index]
        q_THD = layer.context.kernels.prepare_latent(
            q_THD, rows_TR, layer.prep, positions_T, slots_T, *caches
        )
        return self._attend(layer, q_THD, positions_T)

    def _batch(self, positions_T: Tensor) -> Sequence[tuple[int, int]]:
        return self.batch or [(0, len(positions_T))]

    def _starts(self, positions_T: Tensor) -> list[int]:
        """The slot of each sequence's first token."""
        batch = self._batch(positions_T)
        return [sequence * self.blocks_per_sequence * _BLOCK_SIZE for sequence, _ in batch]

    def _slots(self, positions_T: Tensor) -> Tensor:
        """Where tokens are stored."""
        counts = [count for _, count in self._batch(positions_T)]
        first_slots = torch.tensor(self._starts(positions_T)).repeat_interleave(
            torch.tensor(counts)
        )
        return positions_T.long() + first_slots.to(positions_T.device)

    def _attend(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Prepared queries of all sequences -> [T, H·V], from what is cached by now."""
        counts = [count for _, count in self._batch(positions_T)]
        outputs = []
        for q_part, positions, start in zip(
            q_THD.split(counts), positions_T.split(counts), self._starts(positions_T), strict=True
        ):
            keys_S = torch.arange(int(positions.max()) + 1, device=positions.device)
            own = [cache.flatten(0, 1)[start:] for cache in self.caches[layer.layer_index]]
            outputs.append(_attend_one(layer, q_part, positions, keys_S, own))
        return torch.cat(outputs).flatten(1).to(q_THD.dtype)


class SparseRuntime(DenseRuntime):
    """The same for one sequence of which only some positions are there, in increasing order.

    So a few tokens reach the far end of a long context. `positions_S` are those of all its tokens.
    """

    def __init__(self, model: nn.Module, positions_S: Tensor) -> None:
        super().__init__(model, len(positions_S))
        self.positions_S = positions_S

    def _slots(self, positions_T: Tensor) -> Tensor:
        """Tokens lie in the cache in their order."""
        return torch.searchsorted(self.positions_S, positions_T.to(self.positions_S.dtype))

    def _attend(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Tokens see what is at positions up to their own."""
        keys_S = self.positions_S[: int(self._slots(positions_T).max()) + 1]
        own = [cache.flatten(0, 1) for cache in self.caches[layer.layer_index]]
        return _attend_one(layer, q_THD, positions_T, keys_S, own).flatten(1).to(q_THD.dtype)


def _attend_one(
    layer: AttentionLayer,
    q_THD: Tensor,
    positions_T: Tensor,
    keys_S: Tensor,
    caches: Sequence[Tensor],
) -> Tensor:
    """One sequence's queries over the first S tokens of its caches, in float32.

    `keys_S` are the positions of the keys.
    """
    shape = layer.shape
    k_SHD, v_SHD = _keys_and_values(layer, [cache[: len(keys_S)] for cache in caches])
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * layer.scale
    if shape.soft_cap is not None:
        scores_HTS = shape.soft_cap * torch.tanh(scores_HTS / shape.soft_cap)
    distance_TS = positions_T[:, None].long() - keys_S.long()
    hidden_TS = distance_TS < 0
    if shape.sliding_window is not None:
        hidden_TS |= distance_TS >= shape.sliding_window
    weights_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)


def _keys_and_values(layer: AttentionLayer, caches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Those of all query heads, in float32: [S, H, D] and [S, H, V]."""
    if isinstance(layer, LatentAttention):
        return (x.float() for x in layer.expand_rows(*caches))
    group = layer.shape.num_heads // layer.shape.num_kv_heads
    return (cache.float().repeat_interleave(group, dim=1) for cache in caches)
