"""The contract of a model architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the runner must know of a model before it is built, for one whole (unsplit) model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool = False


class CausalLM(Protocol):
    """A decoder, an `nn.Module` built from `nanovllm_core.layers`.

    The class is called as `Model(config, context)`: `config` is the checkpoint's config.json as a
    dict, `context` a `nanovllm_core.layers.LayerContext` (device, dtype, tensor-parallel group,
    kernel set). A model never knows which attention backend runs, never norms or rotates q and k
    itself, and keeps no state between calls.

    `packed_modules` maps a module name of the checkpoint to the parameter that holds it and the
    shard: `{"q_proj": ("qkv_proj", "q"), "gate_proj": ("gate_up_proj", 0)}`. `ignored_weights` are
    full names the checkpoint may hold and the model does not want.
    """

    packed_modules: Mapping[str, tuple[str, str | int]]
    ignored_weights: Sequence[str]

    @classmethod
    def shape(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from config.json; raise ArchitectureError for a setting not supported."""

    def forward(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Token ids and positions, int32 or int64 [T] -> hidden states [T, hidden_size], normed."""

    def compute_logits(self, hidden_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Hidden states -> logits [T, vocab_size] in the model's dtype, in `out_TV` where given."""
