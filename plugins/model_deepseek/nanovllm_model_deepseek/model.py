"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, mixtures of experts.

The decoder is the core's. What is DeepSeek's own is in its settings: the attention of all layers,
and the MLP of those with a mixture.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic import BaseModel
from torch import Tensor, nn

from nanovllm_core.api import ArchitectureError, ModelShape
from nanovllm_core.layers import (
    DecoderConfig,
    DecoderForCausalLM,
    LatentAttention,
    LayerContext,
    SparseMLP,
    expert_modules,
    positive_int,
    refuse_unless,
)
from nanovllm_model_deepseek.settings import (
    MixtureConfig,
    read_block_size,
    read_count,
    read_latent,
    read_v2_mixture,
    read_v3_mixture,
)

MAX_FURTHER_LAYERS = 1000
"""Far more than any checkpoint has."""


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V2 and V2-Lite: queries compressed or not, experts chosen by softmax."""

    @staticmethod
    def read_mixture(config: Mapping[str, Any]) -> MixtureConfig:
        """The mixtures of the architecture; ArchitectureError for a rule that is not its own."""
        return read_v2_mixture(config)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Here a head is what rotates of it; the rest is in `read_latent`."""
        refuse_unless(config, mlp_bias=False)
        own: dict[str, Any] = {"head_dim": positive_int(config, "qk_rope_head_dim", default=64)}
        if read_block_size(config) is not None:
            own["quantization_config"] = None
        settings = DecoderConfig.from_config(ChainMap(own, cast(dict[str, Any], config)))
        read_latent(config, settings.rope)
        cls.read_mixture(config)
        return settings

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """One row of a token is cached for all heads."""
        settings = cls.read_config(config)
        layer = read_latent(config, settings.rope).shape
        return replace(
            settings.shape(),
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            attention_layers=(layer,) * settings.num_hidden_layers,
        )

    @classmethod
    def make_attention(
        cls,
        config: Mapping[str, Any],
        settings: DecoderConfig,
        context: LayerContext,
        cos_sin_cache: Tensor,
    ) -> nn.Module:
        return LatentAttention(context, read_latent(config, settings.rope), cos_sin_cache)

    @classmethod
    def make_mlp(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext, layer: int
    ) -> nn.Module:
        mixture = cls.read_mixture(config)
        if not mixture.is_in(layer):
            return super().make_mlp(config, settings, context, layer)
        return SparseMLP(
            context,
            settings.hidden_size,
            mixture.expert_size,
            mixture.num_experts,
            mixture.routing,
            bias=mixture.has_bias,
            shared_size=mixture.shared_size,
        )

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__(options, config, context)
        latent = dict(LatentAttention.packed_modules)
        del latent["q_a_proj" if config.get("q_lora_rank", 1536) is None else "q_proj"]
        experts = expert_modules(self.read_mixture(config).num_experts)
        gate_up = {name: self.packed_modules[name] for name in ("gate_proj", "up_proj")}
        self.packed_modules = {**gate_up, **latent, **experts}
        self.weight_block_size = read_block_size(config)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3: experts chosen by sigmoid and bias; layers that predict further are left out."""

    @staticmethod
    def read_mixture(config: Mapping[str, Any]) -> MixtureConfig:
        return read_v3_mixture(config)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        settings = super().read_config(config)
        cls.further_layers(config, settings.num_hidden_layers)
        return settings

    @staticmethod
    def further_layers(config: Mapping[str, Any], num_layers: int) -> range:
        """The layers of the checkpoint that predict further tokens: behind the model's own."""
        further = read_count(config, "num_nextn_predict_layers", default=1)
        if further > MAX_FURTHER_LAYERS:
            raise ArchitectureError(
                f"config.json: num_nextn_predict_layers is {further}, and at most "
                f"{MAX_FURTHER_LAYERS} are read over; check the checkpoint's config.json"
            )
        return range(num_layers, num_layers + further)

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__(options, config, context)
        further = self.further_layers(config, positive_int(config, "num_hidden_layers"))
        self.ignored_weights = [f"model.layers.{layer}." for layer in further]
