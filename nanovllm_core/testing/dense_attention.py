"""The simplest attention runtime: one sequence, pages in order, plain softmax in float32.

It runs a model without an engine, as a reference for engines and backends and to test models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm_core.layers import Attention

_BLOCK_SIZE = 16


class DenseRuntime:
    """Runs every `Attention` of a model over its own KV cache of at most `max_len` tokens.

    Calls continue one sequence: tokens are stored at their positions, and each attends to all
    positions up to its own.
    """

    def __init__(self, model: nn.Module, max_len: int) -> None:
        num_pages = -(-max_len // _BLOCK_SIZE)
        self.caches: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if isinstance(module, Attention):
                prep, context = module.prep, module.context
                shape = (num_pages, _BLOCK_SIZE, prep.num_kv_heads, prep.head_size)
                k_cache = torch.zeros(shape, dtype=context.dtype, device=context.device)
                module.bind(self, len(self.caches))
                self.caches.append((k_cache, torch.zeros_like(k_cache)))

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        caches = self.caches[layer.layer_index]
        slots_T = positions_T.long()
        q_THD = layer.context.kernels.prepare_qkv(qkv_TX, layer.prep, positions_T, slots_T, *caches)
        group = layer.prep.num_heads // layer.prep.num_kv_heads
        length = int(positions_T.max()) + 1
        k_SHD, v_SHD = (
            cache.flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) for cache in caches
        )
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD) * layer.scale
        if layer.soft_cap is not None:
            scores_HTS = layer.soft_cap * torch.tanh(scores_HTS / layer.soft_cap)
        distance_TS = slots_T[:, None] - torch.arange(length, device=slots_T.device)
        hidden_TS = distance_TS < 0
        if layer.sliding_window is not None:
            hidden_TS |= distance_TS >= layer.sliding_window
        weights_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf")).softmax(dim=-1)
        out_THD = torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
        return out_THD.flatten(1).to(qkv_TX.dtype)
