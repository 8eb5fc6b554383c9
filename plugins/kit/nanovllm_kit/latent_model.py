"""A model of latent attention and plain MLPs, with the settings of DeepSeek's config.json.

It is what tests of the engine run; `q_lora_rank` may be null. No checkpoint of it exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.layers import (
    LatentAttention,
    LatentConfig,
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RopeConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    build_cos_sin_cache,
    gated_mlp,
)


def latent_config(config: Mapping[str, Any]) -> LatentConfig:
    """The attention's settings, scaled by the size of a key."""
    key_size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    names = (
        "hidden_size",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rms_norm_eps",
    )
    return LatentConfig(scale=key_size**-0.5, **{name: config[name] for name in names})


class _Layer(nn.Module):
    def __init__(
        self, config: Mapping[str, Any], context: LayerContext, cos_sin_cache: Tensor
    ) -> None:
        super().__init__()
        size, inner, eps = (
            config["hidden_size"],
            config["intermediate_size"],
            config["rms_norm_eps"],
        )
        self.input_layernorm = RMSNorm(context, size, eps)
        self.self_attn = LatentAttention(context, latent_config(config), cos_sin_cache)
        self.post_attention_layernorm = RMSNorm(context, size, eps)
        self.gate_up_proj = MergedColumnParallelLinear(context, size, (inner, inner))
        self.down_proj = RowParallelLinear(context, inner, size)

    def forward(self, residual_TE: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.self_attn(residual_TE, self.input_layernorm, positions_T)
        norm = self.post_attention_layernorm
        return gated_mlp(residual_TE, norm, self.gate_up_proj, self.down_proj)


class LatentForCausalLM(nn.Module):
    """See `nanovllm_core.interfaces.model.CausalLM`."""

    packed_modules: Mapping[str, tuple[str, str | int | tuple[str | int, ...]]] = {
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
        **LatentAttention.packed_modules,
    }
    ignored_weights: Sequence[str] = ()

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        num_layers, attention = config["num_hidden_layers"], latent_config(config).shape
        return ModelShape(
            num_layers=num_layers,
            hidden_size=config["hidden_size"],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            vocab_size=config["vocab_size"],
            max_position=config["max_position_embeddings"],
            attention_layers=(attention,) * num_layers,
        )

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__()
        size, vocab_size = config["hidden_size"], config["vocab_size"]
        rope = RopeConfig.from_config(config, config["qk_rope_head_dim"])
        cos_sin_cache = build_cos_sin_cache(rope, context.device)
        self.embed_tokens = VocabParallelEmbedding(context, vocab_size, size)
        self.layers = nn.ModuleList(
            _Layer(config, context, cos_sin_cache) for _ in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(context, size, config["rms_norm_eps"])
        self.lm_head = ParallelLMHead(context, vocab_size, size)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.embed_tokens(input_ids_T)
        for layer in self.layers:
            residual_TE = layer(residual_TE, positions_T)
        return self.norm(residual_TE)

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        return self.lm_head(hidden_TE, out_TV)
