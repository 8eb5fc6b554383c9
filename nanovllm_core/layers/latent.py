"""Latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): keys and values compressed into one row.

    x -> q: q_proj, or q_a_proj -> norm -> q_b_proj          per head: nope part, rotated part
    x -> row: kv_a_proj_with_mqa                             latent part (normed), rotated part
    latent part -> kv_b_proj                                 per head: key's nope part, value

Only the row is cached. Long prompts compute keys and values from rows. Other steps compute neither:
q · (W_k c) = (W_kᵀ q) · c, so W_k is applied to the query and W_v behind the attention, once per
query instead of once per key, and the rows are keys and values themselves (absorption).

Heads are split over ranks. The compression is small, and whole on every rank, as are the rows.

Shape suffixes: T tokens, E hidden size, H query heads of this rank, D = nope + rotated size of a
head's key, V its value's, L latent size, R = L + rotated size, a cached row; K keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import LatentPrep
from nanovllm_core.interfaces.model import AttentionShape, LatentHeads
from nanovllm_core.layers.attention import AttentionLayer
from nanovllm_core.layers.blocks import linear_add, norm_linear
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm_core.layers.matrix import Piece, WeightMatrix, make_split_parameter
from nanovllm_core.layers.module import Layer
from nanovllm_core.layers.norm import RMSNorm

_WORD = torch.int64
"""Keys are concatenated as elements of this type where all sizes are whole words: in half precision
that takes a third of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The settings of a latent attention layer, named as in DeepSeek's config.json.

    `q_lora_rank` None: queries are not compressed. `scale` multiplies the scores: usually
    (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, with yarn times the square of its mscale.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    q_lora_rank: int | None = None
    rms_norm_eps: float = 1e-6

    @property
    def shape(self) -> AttentionShape:
        """The facts of a whole (unsplit) layer, for `ModelShape.attention_layers`."""
        return AttentionShape(
            num_heads=self.num_attention_heads,
            num_kv_heads=1,
            head_size=self.kv_lora_rank + self.qk_rope_head_dim,
            latent=self.heads,
        )

    @property
    def heads(self) -> LatentHeads:
        """The sizes of a head's key and value, and of the latent part."""
        return LatentHeads(
            latent_size=self.kv_lora_rank,
            key_size=self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_size=self.v_head_dim,
        )


class LatentAttention(AttentionLayer):
    """A whole attention block: projections, attention through the cache, output and residual.

    `cos_sin_cache` [max_position, qk_rope_head_dim] is `build_cos_sin_cache`'s; it rotates pairs
    2i and 2i + 1 (DeepSeek's checkpoints interleave). Submodules are named as in checkpoints, but
    for the two products of one input, which are one: a model with this layer adds its
    `packed_modules` to its own. Raises ArchitectureError for heads that ranks cannot share.
    """

    packed_modules: Mapping[str, tuple[str, str]] = {
        "q_proj": ("qkv_a_proj", "q"),
        "q_a_proj": ("qkv_a_proj", "q_a"),
        "kv_a_proj_with_mqa": ("qkv_a_proj", "kv"),
    }

    def __init__(self, context: LayerContext, config: LatentConfig, cos_sin_cache: Tensor) -> None:
        super().__init__(context, config.scale)
        self.config = config
        self._shape = config.shape.on_rank(context.tp.size)
        hidden_size, rank = config.hidden_size, config.kv_lora_rank
        self._key_size = config.heads.key_size
        sizes = rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        bytes_ = (size * context.dtype.itemsize for size in (*sizes, config.q_lora_rank or 0))
        whole = not any(number % _WORD.itemsize for number in bytes_)
        self._word = _WORD if whole else context.dtype
        num_heads = config.num_attention_heads
        self.qkv_a_proj = _DownProjection(context, config)
        if config.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(context, config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = ColumnParallelLinear(
                context, config.q_lora_rank, num_heads * self._key_size
            )
        self.kv_a_layernorm = RMSNorm(context, rank, config.rms_norm_eps)
        self.kv_b_proj = _UpProjection(context, config)
        self.o_proj = RowParallelLinear(context, num_heads * config.v_head_dim, hidden_size)
        self.prep = LatentPrep(
            norm_weight=self.kv_a_layernorm.weight,
            cos_sin_cache=cos_sin_cache,
            eps=config.rms_norm_eps,
        )

    @property
    def shape(self) -> AttentionShape:
        return self._shape

    @property
    def first_matrix(self) -> WeightMatrix:
        """That of the product with which `forward` starts."""
        return self.qkv_a_proj.matrix

    def announce(self, norm: RMSNorm) -> None:
        """`norm` is the next reader of the sum."""
        self.o_proj.sum.norm = norm

    def forward(self, residual_TE: Tensor, norm: RMSNorm, positions_T: Tensor) -> Tensor:
        """residual + attention(norm(residual)) [S, E]; positions int32 or int64 [T].

        S are the tokens that `keep_sampled` leaves. The residual is overwritten: only what is
        returned counts. InconsistentStateError where the layer was not bound yet.
        """
        qkv_TX = norm_linear(residual_TE, norm, self.qkv_a_proj)
        q_TX, rows_TR = qkv_TX.split((self.qkv_a_proj.q_size, self._shape.head_size), dim=-1)
        if self.config.q_lora_rank is not None:
            q_TX = norm_linear(q_TX, self.q_a_layernorm, self.q_b_proj)
        q_THD = q_TX.unflatten(-1, (-1, self._key_size))
        out_TX = self.runtime.attend_latent(self, q_THD, rows_TR, positions_T)
        out_SX, residual_SE = self.keep_sampled(out_TX, residual_TE)
        return linear_add(out_SX, self.o_proj, residual_SE)

    # What a runtime calls. Rows are as `KernelSet.prepare_latent` stores them.

    def absorb(self, q_THD: Tensor) -> Tensor:
        """Prepared queries [T, H, D] -> queries of rows [T, H, R]."""
        weight_HLN = self.kv_b_proj.key_weight.transpose(1, 2)
        return self.context.kernels.linear_per_head(q_THD, weight_HLN)

    def expand_output(self, out_THL: Tensor) -> Tensor:
        """The output of attention to rows [T, H, L] -> that to values [T, H, V]."""
        return self.context.kernels.linear_per_head(out_THL, self.kv_b_proj.value_weight)

    def expand_rows(self, rows_KR: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [K, R] -> keys [K, H, D], contiguous, and values [K, H, V], of all heads."""
        num_heads, config = self._shape.num_heads, self.config
        latent_KL, rotated_KX = rows_KR.tensor_split((config.kv_lora_rank,), dim=-1)
        kv_KX = self.context.kernels.linear(latent_KL, self.kv_b_proj.weight)
        kv_KHX = kv_KX.unflatten(-1, (num_heads, -1))
        nope_KHN, v_KHV = kv_KHX.tensor_split((config.qk_nope_head_dim,), dim=-1)
        rotated_KHX = rotated_KX.view(self._word).unsqueeze(1).expand(-1, num_heads, -1)
        k_KHD = torch.cat((nope_KHN.view(self._word), rotated_KHX), dim=-1)
        return k_KHD.view(rows_KR.dtype), v_KHV


class _DownProjection(ColumnParallelLinear):
    """q, or its compression, and the row to cache, as one product: [T, E] -> [T, q_size + R].

    Uncompressed queries are split by heads; what is compressed is whole on every rank.
    """

    def __init__(self, context: LayerContext, config: LatentConfig) -> None:
        shape = config.shape.on_rank(context.tp.size)
        if config.q_lora_rank is not None:
            shard, q = "q_a", Piece(config.q_lora_rank, 0, config.q_lora_rank)
        else:
            size = shape.num_heads * config.heads.key_size
            shard, q = "q", Piece(size, context.tp.rank * size, context.tp.size * size)
        self.q_size = q.size
        row = Piece(shape.head_size, 0, shape.head_size)
        self._build(context, config.hidden_size, {shard: q, "kv": row}, bias=False)


class _UpProjection(Layer):
    """The weight that makes keys and values of the latent part; [H · (nope + V), L], by heads."""

    def __init__(self, context: LayerContext, config: LatentConfig) -> None:
        super().__init__(context)
        num_heads = config.shape.on_rank(context.tp.size).num_heads
        per_head = config.qk_nope_head_dim + config.v_head_dim
        size = num_heads * per_head
        rows = Piece(size, context.tp.rank * size, context.tp.size * size)
        rank = config.kv_lora_rank
        self.weight = make_split_parameter(context, {None: rows}, Piece(rank, 0, rank))
        by_heads = self.weight.view(num_heads, per_head, rank)
        self.key_weight, self.value_weight = by_heads.split(
            (config.qk_nope_head_dim, config.v_head_dim), dim=1
        )
        """[H, nope, L] and [H, V, L], views."""
