"""GPT-NeoX as a plugin's author writes it: a decoder of another make, for the models' suite.

One KV head for each head, q, k and v of each head side by side in one tensor, layer norms with
biases, a partial rotation, and attention and MLP that both read the same residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from nanovllm_core.api import ModelShape, QKPrep
from nanovllm_core.layers import (
    Attention,
    ColumnParallelLinear,
    Layer,
    LayerContext,
    ParallelLMHead,
    RopeConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    build_cos_sin_cache,
    linear_add,
    make_parameter,
    positive_float,
    positive_int,
    refuse_unless,
)


class LayerNorm(Layer):
    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context)
        self.eps = eps
        self.weight = make_parameter(context, (size,), dummy_mean=1.0, dummy_std=0.0)
        self.bias = make_parameter(context, (size,))

    def forward(self, x_TE: Tensor) -> Tensor:
        return layer_norm(x_TE, self.weight.shape, self.weight, self.bias, self.eps)


class InterleavedQKVLinear(Layer):
    def __init__(self, context, input_size, num_heads, head_size, bias):
        super().__init__(context)
        self.num_heads, self.head_size = context.share(num_heads, "heads"), head_size
        rows, all_rows = 3 * self.num_heads * head_size, 3 * num_heads * head_size
        self.weight = make_parameter(
            context, (rows, input_size), self._load, {None: (all_rows, input_size)}
        )
        self.bias = (
            make_parameter(context, (rows,), self._load, {None: (all_rows,)}) if bias else None
        )

    def _load(self, param, tensor, shard_id):
        first = self.context.tp.rank * self.num_heads
        heads = tensor.unflatten(0, (-1, 3, self.head_size))[first : first + self.num_heads]
        param.copy_(heads.transpose(0, 1).flatten(0, 2))  # all of q, then all of k, then all of v

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.context.kernels.linear(x_TE, self.weight, self.bias)


class GPTNeoXAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any], context: LayerContext, table: Tensor) -> None:
        super().__init__()
        size, bias = config["hidden_size"], config.get("attention_bias", True)
        num_heads = config["num_attention_heads"]
        head_size = size // num_heads
        self.query_key_value = InterleavedQKVLinear(context, size, num_heads, head_size, bias)
        self.dense = RowParallelLinear(context, size, size, bias=bias)
        heads = self.query_key_value.num_heads
        prep = QKPrep(num_heads=heads, num_kv_heads=heads, head_size=head_size, cos_sin_cache=table)
        self.attn = Attention(context, prep, scale=head_size**-0.5)


class GPTNeoXMLP(nn.Module):
    def __init__(self, config: Mapping[str, Any], context: LayerContext) -> None:
        super().__init__()
        size, width = config["hidden_size"], config["intermediate_size"]
        self.dense_h_to_4h = ColumnParallelLinear(context, size, width, bias=True)
        self.dense_4h_to_h = RowParallelLinear(context, width, size, bias=True)


class GPTNeoXLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any], context: LayerContext, table: Tensor) -> None:
        super().__init__()
        size, eps = config["hidden_size"], positive_float(config, "layer_norm_eps", 1e-5)
        self.parallel = config.get("use_parallel_residual", True)
        self.input_layernorm = LayerNorm(context, size, eps)
        self.post_attention_layernorm = LayerNorm(context, size, eps)
        self.attention = GPTNeoXAttention(config, context, table)
        self.mlp = GPTNeoXMLP(config, context)

    def forward(self, residual_TE: Tensor, positions_T: Tensor) -> Tensor:
        attention, norm = self.attention, self.post_attention_layernorm
        qkv_TX = attention.query_key_value(self.input_layernorm(residual_TE))
        # Before linear_add overwrites the residual.
        normed_TE = norm(residual_TE) if self.parallel else None
        out_TX = attention.attn(qkv_TX, positions_T)
        residual_TE = linear_add(out_TX, attention.dense, residual_TE)
        if normed_TE is None:
            normed_TE = norm(residual_TE)
        hidden_TF = gelu(self.mlp.dense_h_to_4h(normed_TE))
        return linear_add(hidden_TF, self.mlp.dense_4h_to_h, residual_TE)


class GPTNeoXModel(nn.Module):
    def __init__(self, config: Mapping[str, Any], context: LayerContext) -> None:
        super().__init__()
        size, eps = config["hidden_size"], positive_float(config, "layer_norm_eps", 1e-5)
        table = build_cos_sin_cache(read_rope(config), context.device)
        self.embed_in = VocabParallelEmbedding(context, config["vocab_size"], size)
        self.layers = nn.ModuleList(
            GPTNeoXLayer(config, context, table) for _ in range(config["num_hidden_layers"])
        )
        self.final_layer_norm = LayerNorm(context, size, eps)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        residual_TE = self.embed_in(input_ids_T)
        for layer in self.layers:
            residual_TE = layer(residual_TE, positions_T)
        return self.final_layer_norm(residual_TE)


class GPTNeoXForCausalLM(nn.Module):
    packed_modules: Mapping[str, Any] = {}
    ignored_weights = ()

    def __init__(
        self, options: BaseModel, config: Mapping[str, Any], context: LayerContext
    ) -> None:
        super().__init__()
        self.gpt_neox = GPTNeoXModel(config, context)
        self.embed_out = ParallelLMHead(
            context,
            config["vocab_size"],
            config["hidden_size"],
            tied_to=self.gpt_neox.embed_in if config.get("tie_word_embeddings") else None,
        )

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        refuse_unless(config, hidden_act="gelu")
        if config.get("quantization_config"):
            refuse_unless(config, quantization_config=None)
        heads, size = (
            positive_int(config, "num_attention_heads"),
            positive_int(config, "hidden_size"),
        )
        return ModelShape(
            num_layers=positive_int(config, "num_hidden_layers"),
            hidden_size=size,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=size // heads,
            vocab_size=positive_int(config, "vocab_size"),
            max_position=read_rope(config).max_position,
            tied_embeddings=bool(config.get("tie_word_embeddings")),
        )

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.gpt_neox(input_ids_T, positions_T)

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        return self.embed_out(hidden_TE, out_TV)


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Which dimensions rotate was `rotary_pct` before transformers 5."""
    head_size = positive_int(config, "hidden_size") // positive_int(config, "num_attention_heads")
    old = {
        "partial_rotary_factor": config.get("rotary_pct"),
        "rope_theta": config.get("rotary_emb_base"),
    }
    return RopeConfig.from_config({**{k: v for k, v in old.items() if v}, **config}, head_size)
