"""Runs a model's attention layers through the chosen backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.layers import Attention
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.model import LoadedModel


class PagedAttention:
    """Prepares q, stores k and v, and calls the decode and the prefill backend for their tokens.

    The backends have their workspaces, and are one object where both are one choice. Every
    attention layer of the model is bound to this object (`Attention.bind`), so there is no global
    context and two engines live side by side.
    """

    cache: Tensor
    """Blocks of keys and values [layers, 2, N, P, K, D]; set before the first step."""

    def __init__(self, setup: WorkerSetup, kernels: KernelSet, model: LoadedModel) -> None:
        layers = [one for one in model.module.modules() if isinstance(one, Attention)]
        config = AttentionConfig(
            device=model.device,
            dtype=model.dtype,
            block_size=setup.block_size,
            max_num_seqs=setup.config.limits.max_num_seqs,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.config.limits.max_num_batched_tokens,
            **_common_facts(layers, model.shape),
        )
        self._kernels = kernels
        self.prefill_backend: AttentionBackend = make_plugin(setup.prefill_attention, config)
        self.decode_backend = self.prefill_backend
        if setup.decode_attention != setup.prefill_attention:
            self.decode_backend = make_plugin(setup.decode_attention, config)
        for index, layer in enumerate(layers):
            layer.bind(self, index)
        self.prefill_backend.allocate()
        if self.decode_backend is not self.prefill_backend:
            self.decode_backend.allocate()

    def describe(self) -> str:
        """The implementations that run."""
        prefill, decode = self.prefill_backend, self.decode_backend
        if prefill is decode:
            return decode.describe()
        return f"prefill {prefill.describe()}, decode {decode.describe()}"

    def begin_step(
        self,
        slot_mapping_T: Tensor,
        decode: DecodeMetadata | None = None,
        prefill: PrefillMetadata | None = None,
    ) -> None:
        """Plan a step of decode tokens, then packed prompt chunks; the layers run next."""
        if decode is not None:
            self.decode_backend.plan_decode(decode)
        if prefill is not None:
            self.prefill_backend.plan_prefill(prefill)
        self._slot_mapping_T, self._decode, self._prefill = slot_mapping_T, decode, prefill

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed qkv of one layer -> attention output [T, num_heads * head_size]."""
        decode, prefill, num_decode = self._decode, self._prefill, 0
        k_cache, v_cache = self.cache[layer.layer_index].unbind()
        q_THD = self._kernels.prepare_qkv(
            qkv_TX, layer.prep, positions_T, self._slot_mapping_T, k_cache, v_cache
        )
        out_THD = torch.empty_like(q_THD)
        if decode is not None:
            num_decode = decode.num_rows
            self.decode_backend.run_decode(
                q_THD[:num_decode], k_cache, v_cache, decode, out_THD[:num_decode]
            )
        if prefill is not None:
            self.prefill_backend.run_prefill(
                q_THD[num_decode:], k_cache, v_cache, prefill, out_THD[num_decode:]
            )
        return out_THD.flatten(1)


def _common_facts(layers: Sequence[Attention], shape: ModelShape) -> dict[str, Any]:
    """What all layers have in common, as `AttentionConfig` names it.

    One backend serves all layers: a layer that differs is refused, not ignored in silence.
    """
    facts: list[dict[str, Any]] = [
        {
            "num_heads": layer.prep.num_heads,
            "num_kv_heads": layer.prep.num_kv_heads,
            "head_size": layer.prep.head_size,
            "scale": layer.scale,
            "sliding_window": layer.sliding_window,
            "soft_cap": layer.soft_cap,
        }
        for layer in layers
    ]
    # The backends were asked at start by the shape alone.
    asked = ("head_size", "sliding_window", "soft_cap")
    common = facts[0] | {name: getattr(shape, name) for name in asked}
    for index, one in enumerate(facts):
        if differing := {name: fact for name, fact in one.items() if fact != common[name]}:
            raise UnsupportedError(
                f"attention layer {index} has {differing}, not "
                f"{ {name: common[name] for name in differing} } as layer 0 or the model plugin's "
                "shape(): one backend serves all layers; use a model whose layers do not differ, "
                "or correct the model plugin"
            )
    return common
