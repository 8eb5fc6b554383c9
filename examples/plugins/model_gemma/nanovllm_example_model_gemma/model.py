"""Gemma 2 (arXiv:2408.00118) and the text model of Gemma 3 (arXiv:2503.19786).

    scaled embedding -> N layers, each: x += norm(attention(norm(x))); x += norm(MLP(norm(x)))
    -> norm -> head, capped

It began as a copy of `nanovllm_core.layers.decoder`, which says how a model is written. What is
Gemma's own: norms behind attention and MLP too, all of them times 1 + weight; GELU instead of SiLU;
a scale of the embedding; caps; and layers of two kinds, that see everything or slide, each kind
with a rotation of its own.

Shape suffixes: T tokens, S those of them that are still needed, E hidden size, F intermediate size
of this rank, V vocabulary, X packed q, k, v, Y the results of this rank's heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from nanovllm_core.api import ModelShape, QKPrep
from nanovllm_core.layers import (
    Attention,
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    ZeroCenteredRMSNorm,
    build_cos_sin_cache,
    gelu_gate_up,
    norm_add,
    norm_linear,
)
from nanovllm_example_model_gemma.config import GemmaConfig, read_gemma2, read_gemma3

_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
"""Sizes that the `text_config` of Gemma 3 4B lacks; a config.json for text alone must have them."""
_SHARED = ("tie_word_embeddings", "quantization_config")
"""Settings beside `text_config` that concern the text model."""


class SelfAttention(nn.Module):
    """Grouped-query attention; the layer's index says whether it slides, and how it rotates."""

    def __init__(
        self,
        config: GemmaConfig,
        context: LayerContext,
        layer: int,
        cos_sin_caches: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        head_dim, num_heads, bias = (
            config.head_dim,
            config.num_attention_heads,
            config.attention_bias,
        )
        self.qkv_proj = QKVParallelLinear(
            context,
            config.hidden_size,
            num_heads,
            config.num_key_value_heads,
            head_dim,
            bias=bias,
        )
        self.o_proj = RowParallelLinear(
            context, num_heads * head_dim, config.hidden_size, bias=bias
        )
        if config.qk_norm:
            self.q_norm = ZeroCenteredRMSNorm(context, head_dim, config.rms_norm_eps)
            self.k_norm = ZeroCenteredRMSNorm(context, head_dim, config.rms_norm_eps)
        prep = QKPrep(
            num_heads=self.qkv_proj.num_heads,  # this rank's
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=head_dim,
            cos_sin_cache=cos_sin_caches[config.layer_types[layer]],
            q_norm_weight=self.q_norm.factors if config.qk_norm else None,
            k_norm_weight=self.k_norm.factors if config.qk_norm else None,
            eps=config.rms_norm_eps,
        )
        self.attn = Attention(
            context,
            prep,
            scale=config.query_pre_attn_scalar**-0.5,
            sliding_window=config.window(layer),
            soft_cap=config.scores_cap,
        )


class MLP(nn.Module):
    """down(gelu(gate) * up), with gate and up as one product."""

    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(context, config.hidden_size, (size, size))
        self.down_proj = RowParallelLinear(context, size, config.hidden_size)


class DecoderLayer(nn.Module):
    def __init__(
        self,
        config: GemmaConfig,
        context: LayerContext,
        layer: int,
        cos_sin_caches: Mapping[str, Tensor],
    ) -> None:
        super().__init__()

        def norm() -> ZeroCenteredRMSNorm:
            return ZeroCenteredRMSNorm(context, config.hidden_size, config.rms_norm_eps)

        self.self_attn = SelfAttention(config, context, layer, cos_sin_caches)
        self.mlp = MLP(config, context)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(
        self, residual_TE: Tensor, positions_T: Tensor, following: ZeroCenteredRMSNorm
    ) -> Tensor:
        """The residual is overwritten on the way: only what is returned counts.

        `following` is the first norm behind this layer.
        """
        attention, mlp, before_mlp = self.self_attn, self.mlp, self.pre_feedforward_layernorm
        qkv_TX = norm_linear(residual_TE, self.input_layernorm, attention.qkv_proj)
        out_TY = attention.attn(qkv_TX, positions_T)
        out_SY, residual_SE = attention.attn.keep_sampled(out_TY, residual_TE)
        attended_SE = attention.o_proj(out_SY)
        residual_SE = norm_add(attended_SE, self.post_attention_layernorm, residual_SE, before_mlp)
        hidden_SF = gelu_gate_up(residual_SE, before_mlp, mlp.gate_up_proj)
        hidden_SE = mlp.down_proj(hidden_SF)
        return norm_add(hidden_SE, self.post_feedforward_layernorm, residual_SE, following)


class Decoder(nn.Module):
    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__()
        tables = {rope: build_cos_sin_cache(rope, context.device) for rope in config.ropes.values()}
        cos_sin_caches = {kind: tables[rope] for kind, rope in config.ropes.items()}
        self.embed_tokens = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        # Rounded to the model's dtype, as the models were trained: 55.5 for the root of 3072.
        self.embed_scale = torch.tensor(config.hidden_size**0.5).to(context.dtype).item()
        self.layers = nn.ModuleList(
            DecoderLayer(config, context, layer, cos_sin_caches)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = ZeroCenteredRMSNorm(context, config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.embed_tokens(input_ids_T).mul_(self.embed_scale)
        norms = [layer.input_layernorm for layer in self.layers]
        for layer, following in zip(self.layers, [*norms[1:], self.norm], strict=True):
            residual_TE = layer(residual_TE, positions_T, following)
        return self.norm(residual_TE)


class Gemma2ForCausalLM(nn.Module):
    """Gemma 2, all sizes; see `nanovllm_core.api.CausalLM` for the contract."""

    packed_modules: Mapping[str, tuple[str, str | int | tuple[str | int, ...]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored_weights: Sequence[str] = ()

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> GemmaConfig:
        """Read and check config.json; ArchitectureError for what would otherwise be ignored."""
        return read_gemma2(config)

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """The facts that the runner needs before the model is built; see `CausalLM.shape`."""
        return cls.read_config(config).shape()

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__()
        settings = self.read_config(config)
        self.logits_cap = settings.logits_cap
        self.model = Decoder(settings, context)
        self.lm_head = ParallelLMHead(
            context,
            settings.vocab_size,
            settings.hidden_size,
            tied_to=self.model.embed_tokens if settings.tie_word_embeddings else None,
        )

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Token ids and positions [T] -> normed hidden states [T, E]; see `CausalLM.forward`."""
        hidden_TE: Tensor = self.model(input_ids_T, positions_T)
        return hidden_TE

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states -> logits [T, V], in `out_TV` where given; `CausalLM.compute_logits`."""
        logits_TV = self.lm_head(hidden_TE, out_TV)
        if self.logits_cap is None:
            return logits_TV
        return logits_TV.div_(self.logits_cap).tanh_().mul_(self.logits_cap)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 as text alone: 270M, 1B, and what else is saved so."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> GemmaConfig:
        return read_gemma3(config)


class Gemma3ForConditionalGeneration(nn.Module):
    """The text model of Gemma 3 with eyes (4B, 12B, 27B); those are not loaded.

    A prompt of text alone means the same to both: only tokens of an image see what comes later.
    """

    packed_modules = Gemma2ForCausalLM.packed_modules
    ignored_weights: Sequence[str] = ("vision_tower.", "multi_modal_projector.")

    @classmethod
    def text_config(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the text model; published ones leave out what transformers knows."""
        shared = {key: config[key] for key in _SHARED if key in config}
        return {**_TEXT_DEFAULTS, **shared, **config["text_config"]}

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """As `Gemma3ForCausalLM.shape` of the `text_config`."""
        return Gemma3ForCausalLM.shape(cls.text_config(config))

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__()
        self.language_model = Gemma3ForCausalLM(options, self.text_config(config), context)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Token ids and positions [T] -> normed hidden states [T, E]; see `CausalLM.forward`."""
        hidden_TE: Tensor = self.language_model(input_ids_T, positions_T)
        return hidden_TE

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states -> logits [T, V], in `out_TV` where given; `CausalLM.compute_logits`."""
        return self.language_model.compute_logits(hidden_TE, out_TV)
