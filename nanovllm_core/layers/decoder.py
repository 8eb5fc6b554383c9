"""The pre-norm decoder of Llama and its kin, whole: read it to learn how a model is written.

    embed_tokens -> N layers, each: x += attention(norm(x)); x += gated MLP(norm(x)) -> norm -> head

An architecture that is this decoder says in `read_config` how it reads config.json, and is done. A
model of another make starts from a copy of this file in its own package and changes what differs:
all that is imported here is public, in `nanovllm_core.api` and `nanovllm_core.layers`.

What makes it work on every backend, kernel set and number of ranks, and inside captured graphs:
- Modules are named as in checkpoints. Where one of ours holds several of theirs (q, k and v are one
  product, gate and up another), `packed_modules` says which part is which.
- It does not norm or rotate q and k itself: `QKPrep` says as data what should happen to them.
- `norm_linear`, `linear_add` and `gated_mlp` do norm, product, activation and residual together.
  Which kernels run behind them is the kernel set's business.

Shape suffixes: T tokens, S those of them that are still needed behind attention: in the last layer
the tokens that the step samples from. E hidden size, V vocabulary, X packed q, k, v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.interfaces.kernels import QKPrep
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.layers.attention import Attention
from nanovllm_core.layers.blocks import announce_next, announce_norm, linear_add, norm_linear
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.decoder_config import DecoderConfig
from nanovllm_core.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm_core.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm_core.layers.matrix import WeightMatrix
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.rotary import build_cos_sin_cache


class SelfAttention(nn.Module):
    """Grouped-query attention: two products with `Attention` between them."""

    def __init__(self, config: DecoderConfig, context: LayerContext, cos_sin_cache: Tensor) -> None:
        super().__init__()
        head_dim, num_heads = config.head_dim, config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(
            context,
            config.hidden_size,
            num_heads,
            config.num_key_value_heads,
            head_dim,
            bias=config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            context, num_heads * head_dim, config.hidden_size, bias=config.output_bias
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(context, head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(context, head_dim, config.rms_norm_eps)
        prep = QKPrep(
            num_heads=self.qkv_proj.num_heads,  # this rank's
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_size=head_dim,
            cos_sin_cache=cos_sin_cache,
            q_norm_weight=self.q_norm.weight if config.qk_norm else None,
            k_norm_weight=self.k_norm.weight if config.qk_norm else None,
            eps=config.rms_norm_eps,
        )
        self.attn = Attention(
            context, prep, scale=head_dim**-0.5, sliding_window=config.sliding_window
        )

    @property
    def first_matrix(self) -> WeightMatrix:
        """That of the product with which `forward` starts."""
        return self.qkv_proj.matrix

    def announce(self, norm: RMSNorm) -> None:
        """`norm` is the next reader of the sum."""
        self.o_proj.sum.norm = norm

    def forward(self, residual_TE: Tensor, norm: RMSNorm, positions_T: Tensor) -> Tensor:
        """residual + attention(norm(residual)) [S, E]. The residual is overwritten."""
        qkv_TX = norm_linear(residual_TE, norm, self.qkv_proj)
        out_SX, residual_SE = self.attn.keep_sampled(self.attn(qkv_TX, positions_T), residual_TE)
        return linear_add(out_SX, self.o_proj, residual_SE)


class DecoderLayer(nn.Module):
    def __init__(
        self, config: DecoderConfig, context: LayerContext, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        if isinstance(mlp, GatedMLP):  # a mixture's router norms the residual itself
            announce_norm(attention, self.post_attention_layernorm)

    def forward(self, residual_TE: Tensor, positions_T: Tensor) -> Tensor:
        """The residual is overwritten on the way: only what is returned counts."""
        residual_SE = self.self_attn(residual_TE, self.input_layernorm, positions_T)
        out_SE: Tensor = self.mlp(residual_SE, self.post_attention_layernorm)
        return out_SE


class Decoder(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        context: LayerContext,
        make_attention: Callable[[Tensor], nn.Module],
        make_mlp: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        cos_sin_cache = build_cos_sin_cache(config.rope, context.device)  # one for all layers
        self.embed_tokens = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        layers = [
            DecoderLayer(config, context, make_attention(cos_sin_cache), make_mlp(layer))
            for layer in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        for layer, norm in zip(layers, norms[1:], strict=True):
            announce_norm(layer.mlp, norm)
        for layer, following in pairwise(layers):
            announce_next(layer.mlp, following.self_attn)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.embed_tokens(input_ids_T)
        for layer in self.layers:
            residual_TE = layer(residual_TE, positions_T)
        return self.norm(residual_TE)


class DecoderForCausalLM(nn.Module):
    """The base of a model plugin whose architecture is this decoder. It gives `read_config`:

        class MyForCausalLM(DecoderForCausalLM):
            @classmethod
            def read_config(cls, config):
                refuse_unless(config, attention_bias=False, mlp_bias=False)
                return DecoderConfig.from_config(config)

    `nanovllm_core.interfaces.model.CausalLM` is the contract that this keeps.
    """

    # A module of the checkpoint that is a part of one of ours: (our module, which part), or several
    # parts in one tensor: "qkv_proj": ("qkv_proj", ("q", "k", "v")).
    packed_modules: Mapping[str, tuple[str, str | int | tuple[str | int, ...]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    # Weights that a checkpoint may hold and the model does not want; any other is an error.
    ignored_weights: Sequence[str] = ()

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the checkpoint's config.json; called at start, in `shape`, and by the constructor.

        Raises ArchitectureError for a setting that the model would otherwise ignore.
        """
        raise NotImplementedError(f"{cls.__name__} must define read_config(config)")

    @classmethod
    def _settings(cls, config: Mapping[str, Any]) -> DecoderConfig:
        settings = cls.read_config(config)
        if not isinstance(settings, DecoderConfig):
            raise PluginLoadError(
                f"{cls.__name__}.read_config() returned a {type(settings).__name__}; it must "
                "return a DecoderConfig"
            )
        return settings

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """The facts that the runner needs before the model is built; see `CausalLM.shape`."""
        return cls._settings(config).shape()

    @classmethod
    def make_attention(
        cls,
        config: Mapping[str, Any],
        settings: DecoderConfig,
        context: LayerContext,
        cos_sin_cache: Tensor,
    ) -> nn.Module:
        """The attention of a layer; `attention(residual_TE, norm, positions_T)` gives the sum.

        An architecture with another one, such as `LatentAttention`, overrides it, and `shape`.
        """
        return SelfAttention(settings, context, cos_sin_cache)

    @classmethod
    def make_mlp(
        cls, config: Mapping[str, Any], settings: DecoderConfig, context: LayerContext, layer: int
    ) -> nn.Module:
        """The MLP of a layer, from 0; `mlp(residual_TE, norm)` gives the sum, as `GatedMLP` does.

        An architecture with another MLP in some layers, such as `SparseMLP`, overrides it.
        """
        return GatedMLP(
            context, settings.hidden_size, settings.intermediate_size, bias=settings.mlp_bias
        )

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__()
        settings = self._settings(config)
        self.model = Decoder(
            settings,
            context,
            partial(self.make_attention, config, settings, context),
            partial(self.make_mlp, config, settings, context),
        )
        self.lm_head = ParallelLMHead(
            context,
            settings.vocab_size,
            settings.hidden_size,
            tied_to=self.model.embed_tokens if settings.tie_word_embeddings else None,
        )

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Token ids and positions [T] -> normed hidden states [S, E]; see `CausalLM.forward`."""
        hidden_SE: Tensor = self.model(input_ids_T, positions_T)
        return hidden_SE

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states -> logits [T, V], in `out_TV` where given; `CausalLM.compute_logits`."""
        return self.lm_head(hidden_TE, out_TV)
