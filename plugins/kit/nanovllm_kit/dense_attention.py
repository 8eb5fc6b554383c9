"""The simplest attention runtime: blocks in order, softmax in float32, one sequence at a time.

It runs a model without an engine, as a reference for engines and backends and to test models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanovllm_core.layers import Attention

_BLOCK_SIZE = 16


class DenseRuntime:
    """Runs every `Attention` of a model over its own KV cache of sequences of up to `max_len`.

    Calls continue a sequence: tokens are stored at their positions, and each attends to all
    positions up to its own. All tokens belong to sequence 0 unless `set_batch` says otherwise.
    """

    def __init__(self, model: nn.Module, max_len: int, num_sequences: int = 1) -> None:
        self.blocks_per_sequence = -(-max_len // _BLOCK_SIZE)
        self.batch: Sequence[tuple[int, int]] | None = None
        self.caches: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if isinstance(module, Attention):
                prep, context = module.prep, module.context
                num_blocks = num_sequences * self.blocks_per_sequence
                shape = (num_blocks, _BLOCK_SIZE, prep.num_kv_heads, prep.head_size)
                k_cache = torch.zeros(shape, dtype=context.dtype, device=context.device)
                module.bind(self, len(self.caches))
                self.caches.append((k_cache, torch.zeros_like(k_cache)))

    def set_batch(self, batch: Sequence[tuple[int, int]]) -> None:
        """The (sequence, number of tokens) pairs that the next forward pass packs, in order."""
        self.batch = batch

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v of one layer -> [T, H·D]; see `nanovllm_core.layers.AttentionRuntime`."""
        batch = self.batch or [(0, len(positions_T))]
        caches = self.caches[layer.layer_index]
        starts = [sequence * self.blocks_per_sequence * _BLOCK_SIZE for sequence, _ in batch]
        counts = [count for _, count in batch]
        first_slots = torch.tensor(starts).repeat_interleave(torch.tensor(counts))
        slots_T = positions_T.long() + first_slots.to(positions_T.device)
        q_THD = layer.context.kernels.prepare_qkv(qkv_TX, layer.prep, positions_T, slots_T, *caches)
        outputs = []
        for q_part, positions, start in zip(
            q_THD.split(counts), positions_T.split(counts), starts, strict=True
        ):
            keys_S = torch.arange(int(positions.max()) + 1, device=positions.device)
            own = [cache.flatten(0, 1)[start:] for cache in caches]
            outputs.append(_attend_one(layer, q_part, positions, keys_S, own))
        return torch.cat(outputs).flatten(1).to(qkv_TX.dtype)


class SparseRuntime(DenseRuntime):
    """The same for one sequence of which only some positions are there, in increasing order.

    So a few tokens reach the far end of a long context. `positions_S` are those of all its tokens.
    """

    def __init__(self, model: nn.Module, positions_S: Tensor) -> None:
        super().__init__(model, len(positions_S))
        self.positions_S = positions_S

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Tokens lie in the cache in their order, and see what is at positions up to their own."""
        caches = self.caches[layer.layer_index]
        slots_T = torch.searchsorted(self.positions_S, positions_T.to(self.positions_S.dtype))
        q_THD = layer.context.kernels.prepare_qkv(qkv_TX, layer.prep, positions_T, slots_T, *caches)
        keys_S = self.positions_S[: int(slots_T.max()) + 1]
        own = [cache.flatten(0, 1) for cache in caches]
        out_THD = _attend_one(layer, q_THD, positions_T, keys_S, own)
        return out_THD.flatten(1).to(qkv_TX.dtype)


def _attend_one(
    layer: Attention,
    q_THD: Tensor,
    positions_T: Tensor,
    keys_S: Tensor,
    caches: Sequence[Tensor],
) -> Tensor:
    """One sequence's queries over its first S keys and values [slots, K, D], in float32.

    `keys_S` are the positions of the keys.
    """
    group, length = layer.prep.num_heads // layer.prep.num_kv_heads, len(keys_S)
    k_SHD, v_SHD = (cache[:length].float().repeat_interleave(group, dim=1) for cache in caches)
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * layer.scale
    if layer.soft_cap is not None:
        scores_HTS = layer.soft_cap * torch.tanh(scores_HTS / layer.soft_cap)
    distance_TS = positions_T[:, None].long() - keys_S.long()
    hidden_TS = distance_TS < 0
    if layer.sliding_window is not None:
        hidden_TS |= distance_TS >= layer.sliding_window
    weights_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
