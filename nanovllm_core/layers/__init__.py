"""The public door for models: parallel linears, norms, rotation, attention, block operations.

`DecoderForCausalLM` is a whole decoder made of them, the base of models that are one.

A model written only from these never sees a kernel, a cache or a process group, so all three can
change under it.
"""

from nanovllm_core.interfaces.model import (
    heads_per_rank as heads_per_rank,
    vocab_per_rank as vocab_per_rank,
)
from nanovllm_core.interfaces.parallel import (
    NormingParallel as NormingParallel,
    SingleRank as SingleRank,
    TensorParallel as TensorParallel,
)
from nanovllm_core.layers.attention import (
    Attention as Attention,
    AttentionLayer as AttentionLayer,
    AttentionRuntime as AttentionRuntime,
)
from nanovllm_core.layers.blocks import (
    announce_next as announce_next,
    announce_norm as announce_norm,
    gated_mlp as gated_mlp,
    gelu_gate_up as gelu_gate_up,
    linear_add as linear_add,
    norm_add as norm_add,
    norm_linear as norm_linear,
)
from nanovllm_core.layers.context import LayerContext as LayerContext
from nanovllm_core.layers.decoder import DecoderForCausalLM as DecoderForCausalLM
from nanovllm_core.layers.decoder_config import (
    DecoderConfig as DecoderConfig,
    refuse_unless as refuse_unless,
)
from nanovllm_core.layers.embedding import (
    ParallelLMHead as ParallelLMHead,
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from nanovllm_core.layers.experts import (
    Experts as Experts,
    Router as Router,
    SparseMLP as SparseMLP,
    expert_modules as expert_modules,
)
from nanovllm_core.layers.latent import (
    LatentAttention as LatentAttention,
    LatentConfig as LatentConfig,
)
from nanovllm_core.layers.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    MergedColumnParallelLinear as MergedColumnParallelLinear,
    QKVParallelLinear as QKVParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from nanovllm_core.layers.matrix import (
    Piece as Piece,
    Pieces as Pieces,
    PlainMatrix as PlainMatrix,
    WeightMatrix as WeightMatrix,
    make_split_parameter as make_split_parameter,
)
from nanovllm_core.layers.mlp import GatedMLP as GatedMLP
from nanovllm_core.layers.module import (
    Layer as Layer,
    ModelParameter as ModelParameter,
    finalize_layers as finalize_layers,
    make_parameter as make_parameter,
)
from nanovllm_core.layers.norm import RMSNorm as RMSNorm, ZeroCenteredRMSNorm as ZeroCenteredRMSNorm
from nanovllm_core.layers.rotary import (
    RopeConfig as RopeConfig,
    build_cos_sin_cache as build_cos_sin_cache,
)
from nanovllm_core.layers.settings import (
    list_of as list_of,
    nested as nested,
    positive_float as positive_float,
    positive_int as positive_int,
    true_or_false as true_or_false,
)
