"""Root mean square norm."""

from __future__ import annotations

from torch import Tensor

from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer, make_parameter


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension [T, size]. Every rank holds it."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context)
        self.eps = eps
        self.weight = make_parameter(context, (size,), dummy_mean=1.0, dummy_std=0.0)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, size] -> [T, size]; computed in float32, rounded to x's dtype."""
        return self.context.kernels.rms_norm(x_TE, self.weight, self.eps)
