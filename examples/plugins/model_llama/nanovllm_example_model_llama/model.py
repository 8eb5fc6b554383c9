"""Llama (arXiv:2302.13971, 2407.21783) and Mistral (arXiv:2310.06825) from nanovllm's layers.

Modules are named as in the checkpoints; q, k, v and gate, up are packed. Shape suffixes: T tokens,
E hidden size, V vocabulary, X packed q, k, v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nanovllm_core.api import (
    Attention,
    LayerContext,
    MergedColumnParallelLinear,
    ModelShape,
    ParallelLMHead,
    QKPrep,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    build_cos_sin_cache,
    gated_mlp,
    linear_add,
    norm_linear,
)
from nanovllm_example_model_llama.config import DecoderConfig


class DecoderAttention(nn.Module):
    """Grouped-query attention; its bias, if it has one, is on q, k, v and the output alike."""

    def __init__(self, config: DecoderConfig, context: LayerContext, cos_sin_cache: Tensor) -> None:
        super().__init__()
        head_dim, num_heads = config.head_dim, config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(
            context,
            config.hidden_size,
            num_heads,
            config.num_key_value_heads,
            head_dim,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            context, num_heads * head_dim, config.hidden_size, bias=config.attention_bias
        )
        prep = QKPrep(
            num_heads=self.qkv_proj.num_heads,  # this rank's
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=head_dim,
            cos_sin_cache=cos_sin_cache,
        )
        self.attn = Attention(
            context, prep, scale=head_dim**-0.5, sliding_window=config.sliding_window
        )


class DecoderMLP(nn.Module):
    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            context, config.hidden_size, (size, size), bias=bias
        )
        self.down_proj = RowParallelLinear(context, size, config.hidden_size, bias=bias)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, context: LayerContext, cos_sin_cache: Tensor) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(config, context, cos_sin_cache)
        self.mlp = DecoderMLP(config, context)
        self.input_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    def forward(self, residual_TE: Tensor, positions_T: Tensor) -> Tensor:
        attention, mlp = self.self_attn, self.mlp
        qkv_TX = norm_linear(residual_TE, self.input_layernorm, attention.qkv_proj)
        residual_TE = linear_add(attention.attn(qkv_TX, positions_T), attention.o_proj, residual_TE)
        return gated_mlp(
            residual_TE, self.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj
        )


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        super().__init__()
        cos_sin_cache = build_cos_sin_cache(config.rope, context.device)  # one for all layers
        self.embed_tokens = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, context, cos_sin_cache) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.embed_tokens(input_ids_T)
        for layer in self.layers:
            residual_TE = layer(residual_TE, positions_T)
        return self.norm(residual_TE)


class LlamaForCausalLM(nn.Module):
    """See `nanovllm_core.api.CausalLM` for the contract."""

    read_config: Callable[[Mapping[str, Any]], DecoderConfig] = DecoderConfig.of_llama
    packed_modules: Mapping[str, tuple[str, str | int]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored_weights: Sequence[str] = ()

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        settings = cls.read_config(config)
        return ModelShape(
            num_layers=settings.num_hidden_layers,
            hidden_size=settings.hidden_size,
            num_heads=settings.num_attention_heads,
            num_kv_heads=settings.num_key_value_heads,
            head_size=settings.head_dim,
            vocab_size=settings.vocab_size,
            max_position=settings.rope.max_position,
            tied_embeddings=settings.tie_word_embeddings,
            sliding_window=settings.sliding_window,
        )

    def __init__(self, config: Mapping[str, Any], context: LayerContext) -> None:
        super().__init__()
        settings = type(self).read_config(config)
        self.model = Decoder(settings, context)
        self.lm_head = ParallelLMHead(
            context,
            settings.vocab_size,
            settings.hidden_size,
            tied_to=self.model.embed_tokens if settings.tie_word_embeddings else None,
        )
        # Llama 1 and 2 were saved with the rotary frequencies, which follow from the settings.
        self.ignored_weights = [
            f"model.layers.{index}.self_attn.rotary_emb.inv_freq"
            for index in range(settings.num_hidden_layers)
        ]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        hidden_TE: Tensor = self.model(input_ids_T, positions_T)
        return hidden_TE

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        return self.lm_head(hidden_TE, out_TV)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases, and with a sliding window where config.json has one."""

    read_config = DecoderConfig.of_mistral
