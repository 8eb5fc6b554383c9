"""Qwen3-MoE (arXiv:2505.09388): Qwen3, in most layers with a mixture of experts as its MLP.

What config.json leaves out has the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from torch import nn

from nanovllm_core.api import ArchitectureError, Routing
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    LayerContext,
    SparseMLP,
    expert_modules,
    list_of,
    positive_int,
    refuse_unless,
    true_or_false,
)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """The core's decoder with an RMS norm of each head of q and k, and with mixtures."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Windows are refused: Qwen3 has them, if at all, in some of its layers."""
        refuse_unless(config, use_sliding_window=False, layer_types="full_attention")
        top_k, num_experts = cls.routing(config).top_k, cls.num_experts(config)
        if top_k > num_experts:
            raise ArchitectureError(
                f"config.json: num_experts_per_tok ({top_k}) is more than num_experts "
                f"({num_experts}); check the checkpoint's config.json"
            )
        cls.expert_size(config)
        cls.is_sparse(config, layer=0)
        bias = true_or_false(config, "attention_bias")
        return DecoderConfig.from_config(
            {"num_key_value_heads": 4, **config}, qkv_bias=bias, output_bias=bias, qk_norm=True
        )

    @classmethod
    def make_mlp(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext, layer: int
    ) -> nn.Module:
        if not cls.is_sparse(config, layer):
            return super().make_mlp(config, settings, context, layer)
        return SparseMLP(
            context,
            settings.hidden_size,
            cls.expert_size(config),
            cls.num_experts(config),
            cls.routing(config),
        )

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__(options, config, context)
        experts = expert_modules(self.num_experts(config))
        self.packed_modules = {**self.packed_modules, **experts}

    @staticmethod
    def routing(config: Mapping[str, Any]) -> Routing:
        """The rule by which a token chooses its experts."""
        return Routing(
            top_k=positive_int(config, "num_experts_per_tok", default=8),
            renormalize=true_or_false(config, "norm_topk_prob"),
        )

    @staticmethod
    def num_experts(config: Mapping[str, Any]) -> int:
        """transformers 5 calls it `num_local_experts` for some models; older ones `num_experts`."""
        is_local = config.get("num_local_experts") is not None
        name = "num_local_experts" if is_local else "num_experts"
        return positive_int(config, name, default=128)

    @staticmethod
    def expert_size(config: Mapping[str, Any]) -> int:
        """The intermediate size of one expert."""
        return positive_int(config, "moe_intermediate_size", default=768)

    @staticmethod
    def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
        """Whether a layer, from 0, has experts: every so many do, but for some that are named."""
        step = positive_int(config, "decoder_sparse_step", default=1)
        return layer not in list_of(config, "mlp_only_layers", int) and (layer + 1) % step == 0
