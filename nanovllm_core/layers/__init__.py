"""What a model plugin builds with: parallel linears, norms, rotation, attention, block operations.

`DecoderForCausalLM` is a whole decoder made of them, the base of models that are one.

A model written only from these never sees a kernel, a cache or a process group, so all three can
change under it.
"""

from nanovllm_core.kernels import KernelSet, QKPrep
from nanovllm_core.layers.attention import Attention, AttentionRuntime
from nanovllm_core.layers.blocks import gated_mlp, linear_add, norm_linear
from nanovllm_core.layers.context import LayerContext, SingleRank, TensorParallel
from nanovllm_core.layers.decoder import DecoderForCausalLM
from nanovllm_core.layers.decoder_config import DecoderConfig, refuse_unless
from nanovllm_core.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanovllm_core.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    heads_per_rank,
)
from nanovllm_core.layers.module import Layer, ModelParameter, finalize_layers, make_parameter
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.rotary import RopeConfig, build_cos_sin_cache
from nanovllm_core.layers.settings import positive_float, positive_int

__all__ = [
    "Attention",
    "AttentionRuntime",
    "ColumnParallelLinear",
    "DecoderConfig",
    "DecoderForCausalLM",
    "KernelSet",
    "Layer",
    "LayerContext",
    "MergedColumnParallelLinear",
    "ModelParameter",
    "ParallelLMHead",
    "QKPrep",
    "QKVParallelLinear",
    "RMSNorm",
    "RopeConfig",
    "RowParallelLinear",
    "SingleRank",
    "TensorParallel",
    "VocabParallelEmbedding",
    "build_cos_sin_cache",
    "finalize_layers",
    "gated_mlp",
    "heads_per_rank",
    "linear_add",
    "make_parameter",
    "norm_linear",
    "positive_float",
    "positive_int",
    "refuse_unless",
]
