"""The model: nanovllm's decoder with mixtures of experts, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
)
from pydantic import BaseModel
from torch import nn


class MyPluginForCausalLM(DecoderForCausalLM):
    """Grouped-query attention with a norm of each head, and a few experts for each token.

    `make_mlp` makes the MLP of each layer, and `routing` is the rule by which a token chooses its
    experts: softmax or sigmoid, groups of experts, renormalised weights, a scale.
    `expert_modules` are the experts' names in the checkpoint, "17.gate_proj" and so on. The
    attention is the decoder's: `from_config` has a keyword for each of its settings.
    """

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Refuse settings that this model does not support."""
        refuse_unless(config, attention_bias=False, use_sliding_window=False, decoder_sparse_step=1)
        top_k, num_experts = cls.routing(config).top_k, cls.num_experts(config)
        if top_k > num_experts:
            raise ArchitectureError(
                f"config.json: num_experts_per_tok ({top_k}) is more than num_experts "
                f"({num_experts}); check the checkpoint's config.json"
            )
        return DecoderConfig.from_config(config, qk_norm=True)

    @classmethod
    def make_mlp(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext, layer: int
    ) -> nn.Module:
        """Experts, or the dense MLP in the layers that `mlp_only_layers` names."""
        if layer in list_of(config, "mlp_only_layers", int):
            return super().make_mlp(config, settings, context, layer)
        return SparseMLP(
            context,
            settings.hidden_size,
            positive_int(config, "moe_intermediate_size"),
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
        """The rule of every router."""
        return Routing(
            top_k=positive_int(config, "num_experts_per_tok"),
            renormalize=bool(config.get("norm_topk_prob")),
        )

    @staticmethod
    def num_experts(config: Mapping[str, Any]) -> int:
        """transformers 5 calls it `num_local_experts` for some models; older ones `num_experts`."""
        name = "num_local_experts" if "num_local_experts" in config else "num_experts"
        return positive_int(config, name)
