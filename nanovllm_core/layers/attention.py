"""The attention layer: what to compute, bound once to a runtime that knows how."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from nanovllm_core.errors import InconsistentStateError, UnsupportedError
from nanovllm_core.interfaces.kernels import QKPrep
from nanovllm_core.interfaces.model import AttentionShape
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer


class AttentionRuntime(Protocol):
    """Runs attention layers: it owns the KV cache, the backend and the step's metadata."""

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v [T, (H + 2K)·D] -> [T, H·D]; `layer.layer_index` finds the cache."""


class Attention(Layer):
    """Causal attention over packed q, k, v, with this rank's heads, through the paged KV cache.

    Norm and rotation of q and k are data (`prep`), so that a runtime may fuse them. `scale`
    multiplies the scores. `sliding_window`: the number of last keys a query sees, its own included.
    `soft_cap` c turns scores s into c·tanh(s / c). Both must be what the model's `shape` says of
    this layer. Raises UnsupportedError where they are not positive.
    """

    def __init__(
        self,
        context: LayerContext,
        prep: QKPrep,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(context)
        for name, value in (("sliding_window", sliding_window), ("soft_cap", soft_cap)):
            if value is not None and not value > 0:
                raise UnsupportedError(f"{name}={value} must be positive, or None for none")
        self.prep = prep
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.layer_index = -1
        self.runtime: AttentionRuntime | None = None

    @property
    def shape(self) -> AttentionShape:
        """The layer's facts, with this rank's heads."""
        return AttentionShape(
            num_heads=self.prep.num_heads,
            num_kv_heads=self.prep.num_kv_heads,
            head_size=self.prep.head_size,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )

    def bind(self, runtime: AttentionRuntime, layer_index: int) -> None:
        """Called once by the runner, before the first forward."""
        self.runtime = runtime
        self.layer_index = layer_index

    def forward(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v [T, (H + 2K)·D], positions int32 or int64 [T] -> [T, H·D].

        InconsistentStateError where the layer was not bound yet.
        """
        if self.runtime is None:
            raise InconsistentStateError(
                "an attention layer ran before it was bound to a runtime; call bind() on every "
                "Attention module of the model first"
            )
        return self.runtime.attend(self, qkv_TX, positions_T)
