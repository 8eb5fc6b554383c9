"""The attention layer: what to compute, bound once to a runtime that knows how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from nanovllm_core.errors import InconsistentStateError, UnsupportedError
from nanovllm_core.interfaces.kernels import QKPrep
from nanovllm_core.interfaces.model import AttentionShape
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer

if TYPE_CHECKING:
    from nanovllm_core.layers.latent import LatentAttention


class AttentionRuntime(Protocol):
    """Runs attention layers: it owns the KV cache, the backend and the step's metadata."""

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v [T, (H + 2K)·D] -> [T, H·D]; `layer.layer_index` finds the cache."""

    def attend_latent(
        self, layer: LatentAttention, q_THD: Tensor, rows_TR: Tensor, positions_T: Tensor
    ) -> Tensor:
        """Queries and the rows to cache, neither normed nor rotated -> [T, H·V]."""

    def keep_sampled(self, layer: AttentionLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of tensors [T, ...] the S tokens that the step samples from, if `layer` is the last.

        What follows it then sees no others. A runtime may keep all.
        """
        return tensors


class AttentionLayer(Layer):
    """The base of layers that read the KV cache: in the order of the model's modules, one each.

    `scale` multiplies the scores. `layer_index` and `runtime` are what the runner binds.
    """

    def __init__(self, context: LayerContext, scale: float) -> None:
        super().__init__(context)
        self.scale = scale
        self.layer_index = -1
        self._runtime: AttentionRuntime | None = None

    @property
    def shape(self) -> AttentionShape:
        """The layer's facts, with this rank's heads."""
        raise NotImplementedError(f"{type(self).__name__} must define shape")

    @property
    def runtime(self) -> AttentionRuntime:
        """What runs the layer; InconsistentStateError where it was not bound yet."""
        if self._runtime is None:
            raise InconsistentStateError(
                "an attention layer ran before it was bound to a runtime; call bind() on every "
                "AttentionLayer module of the model first"
            )
        return self._runtime

    def bind(self, runtime: AttentionRuntime, layer_index: int) -> None:
        """Called once by the runner, before the first forward."""
        self._runtime = runtime
        self.layer_index = layer_index

    def keep_sampled(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of tensors [T, ...], behind this layer's attention, the tokens that are still needed.

        Behind the model's last attention layer those are the S tokens that the step samples from:
        the last of each prompt chunk, and all that decode. A model that calls it does so wherever
        no token depends on another any more once this layer is the last one, and carries on with
        what it gets. New tensors where not all tokens are kept.
        """
        return self.runtime.keep_sampled(self, *tensors)


class Attention(AttentionLayer):
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
        super().__init__(context, scale)
        for name, value in (("sliding_window", sliding_window), ("soft_cap", soft_cap)):
            if value is not None and not value > 0:
                raise UnsupportedError(f"{name}={value} must be positive, or None for none")
        self.prep = prep
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

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

    def forward(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Packed q, k, v [T, (H + 2K)·D], positions int32 or int64 [T] -> [T, H·D].

        InconsistentStateError where the layer was not bound yet.
        """
        return self.runtime.attend(self, qkv_TX, positions_T)
