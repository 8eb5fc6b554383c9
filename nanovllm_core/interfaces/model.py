"""The contract of a model architecture.

Who calls what, and when:

    Model.shape(config)           at start, before a byte is allocated; again in each worker
    Model(options, config, context)
                                  once per worker; its parameters are filled afterwards
    finalize() of each Layer      once, after the weights are loaded
    forward, compute_logits       once per step: on CUDA captured in decode steps and small steps
                                  with prompts, else eagerly

Shape suffixes: T tokens of a step, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nanovllm_core.errors import ArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

UNREADABLE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""The errors that `CausalLM.shape` may raise for a missing or malformed setting."""


def heads_per_rank(num_heads: int, num_kv_heads: int, tp_size: int) -> tuple[int, int]:
    """(query heads, KV heads) of each rank. Fewer KV heads than ranks are replicated.

    Raises ArchitectureError for head counts that cannot be shared out evenly.
    """
    if num_heads % num_kv_heads != 0:
        raise ArchitectureError(
            f"num_attention_heads ({num_heads}) must be divisible by num_key_value_heads "
            f"({num_kv_heads}); check the checkpoint's config.json"
        )
    small, large = sorted((num_kv_heads, tp_size))
    if num_heads % tp_size != 0 or large % small != 0:
        raise ArchitectureError(
            f"tensor_parallel_size ({tp_size}) must divide num_attention_heads ({num_heads}), and "
            f"must divide num_key_value_heads ({num_kv_heads}) or be divisible by it; choose "
            "another size"
        )
    return num_heads // tp_size, max(num_kv_heads // tp_size, 1)


def vocab_per_rank(vocab_size: int, tp_size: int) -> int:
    """The ids of each rank, in order; where they do not divide, the last ones have padding."""
    return -(-vocab_size // tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The heads of latent attention (MLA, DeepSeek-V2, arXiv:2405.04434).

    One row per token is cached for all heads: `latent_size` numbers, of which each head's key and
    value are linear functions, then the rotated part of the key, which the heads share. Of long
    prompts keys and values are computed: a head's key has `key_size` numbers, the rotated part
    last, and its value `value_size`. Other steps move the functions into the query and behind the
    output (absorption), so that the key is the row itself and the value its first `latent_size`
    numbers.
    In DeepSeek's config.json: kv_lora_rank, qk_nope_head_dim + qk_rope_head_dim, v_head_dim.
    """

    latent_size: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What one attention layer caches of each token, and how far and through what it is read.

    Layers of equal shapes share an attention backend and block tables. `sliding_window` and
    `soft_cap` are those of `AttentionConfig`. With `latent`, what is cached is one row: there is
    one KV head, `head_size` is the row's, and neither window nor cap; else ArchitectureError.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    latent: LatentHeads | None = None

    def __post_init__(self) -> None:
        if self.latent is None:
            return
        size, is_one = self.latent.latent_size, self.num_kv_heads == 1
        sees_all = self.sliding_window is None and self.soft_cap is None
        if not (is_one and sees_all and size <= self.head_size):
            raise ArchitectureError(
                f"latent attention needs num_kv_heads=1, head_size of at least latent_size={size}, "
                "and neither sliding_window nor soft_cap; the model states num_kv_heads="
                f"{self.num_kv_heads}, head_size={self.head_size}, sliding_window="
                f"{self.sliding_window}, soft_cap={self.soft_cap}"
            )

    @property
    def rows_per_token(self) -> int:
        """The rows that a cache keeps of a token: a key and a value, or the one for both."""
        return 1 if self.latent else 2

    @property
    def elements_per_row(self) -> int:
        """The numbers of a row, those of all KV heads."""
        return self.num_kv_heads * self.head_size

    @property
    def elements_per_token(self) -> int:
        """The numbers that a cache keeps of a token."""
        return self.rows_per_token * self.elements_per_row

    def on_rank(self, tp_size: int) -> AttentionShape:
        """The same with the heads of one of `tp_size` ranks; see `heads_per_rank`."""
        num_heads, num_kv_heads = heads_per_rank(self.num_heads, self.num_kv_heads, tp_size)
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The facts of a model that the runner needs before it is built, for a whole (unsplit) model.

    `max_position` is the longest sequence in tokens, prompt and output; `tied_embeddings` says that
    the head shares the embedding's weight, so that a checkpoint brings it once.
    The heads, `sliding_window` and `soft_cap` are those of every attention layer (see
    `AttentionConfig`), so that a backend without them is refused before a weight is read. A model
    whose layers differ gives `attention_layers` too, one for each layer in their order; these then
    hold, and the numbers beside them describe the model to its user.

    Raises ArchitectureError where `attention_layers` are not `num_layers`.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    attention_layers: tuple[AttentionShape, ...] | None = None

    def __post_init__(self) -> None:
        if self.attention_layers is not None and len(self.attention_layers) != self.num_layers:
            raise ArchitectureError(
                f"shape() states {len(self.attention_layers)} attention_layers and num_layers="
                f"{self.num_layers}; state one AttentionShape for each layer, or none if all are "
                "alike"
            )

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """The shape of every attention layer, in their order."""
        if self.attention_layers is not None:
            return self.attention_layers
        alike = AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        return (alike,) * self.num_layers

    def on_rank(self, tp_size: int) -> ModelShape:
        """The same, its attention layers with the heads of one of `tp_size` ranks."""
        layers = tuple(one.on_rank(tp_size) for one in self.attention_shapes)
        return replace(self, attention_layers=layers)


@runtime_checkable
class CausalLM(Protocol):
    """A decoder, an `nn.Module` built from `nanovllm_core.layers`.

    `DecoderForCausalLM` there is a whole one, the base of models that differ from it only in their
    settings, and the place to start from for others.

    The class is called as `Model(options, config, context)`. `options` are `NoOptions`, for no
    configuration gives a model any; `config` is the checkpoint's config.json as a dict, `context` a
    `nanovllm_core.layers.LayerContext` (device, dtype, tensor-parallel group, kernel set).

    A model never knows which attention backend runs, leaves norm and rotation of q and k to
    `QKPrep` where that can state them, and keeps no state between calls. A forward waits for
    nothing and makes no tensor from host values, since it is captured.

    `packed_modules` maps a module name of the checkpoint to the parameter that holds it and the
    shard: `{"q_proj": ("qkv_proj", "q"), "gate_proj": ("gate_up_proj", 0)}`. One that holds several
    shards, one below the other, names them in order: `{"wqkv": ("qkv_proj", ("q", "k", "v"))}`.
    `ignored_weights` are full names the checkpoint may hold and the model does not want; one that
    ends in a dot ("vision_tower.") stands for all that begin so. A model may have
    `weight_block_size`, (rows, columns) or None: a float8 weight of its checkpoint then has a
    tensor of scales, X_scale_inv beside X, with a factor for each block of so many rows and
    columns, and is multiplied by them while it is loaded.
    """

    packed_modules: Mapping[str, tuple[str, str | int | tuple[str | int, ...]]]
    ignored_weights: Sequence[str]

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from config.json; must not need torch's device.

        Raises ArchitectureError for a setting that the model would otherwise ignore. A missing or
        misshapen one may raise any of `UNREADABLE_ERRORS` too, which the core explains: KeyError,
        for one. For a missing one the message names it. `positive_int` and `positive_float` do.
        """

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Token ids and positions, int32 or int64 [T] -> hidden states [T, E], normed.

        Or of the tokens alone that `AttentionLayer.keep_sampled` has left, if the model called it.

        Decoding rows come first, one token each, then prompt chunks, packed. Tokens of padding have
        a valid id and position, and what they bring is ignored; it may be NaN behind the first
        attention, so no token may depend on another but through attention. The result has the
        context's dtype.
        """

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states -> logits [T, V] in the model's dtype, in `out_TV` where given.

        T is the entries of the batch, the last token of each and padding, not all tokens. `out_TV`
        is the buffer that all steps share. With several ranks it may have `vocab_per_rank` columns:
        then the logits are those of this rank's ids alone, and of padding, as `ParallelLMHead`
        gives them. All ranks then ask for the same.
        """
