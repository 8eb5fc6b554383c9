"""Root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import PostNormKernels
from nanovllm_core.layers.context import LayerContext
from nanovllm_core.layers.module import Layer, make_parameter


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension [T, size]. Every rank holds it."""

    dummy_mean = 1.0

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context)
        self.eps = eps
        self.weight = make_parameter(context, (size,), dummy_mean=self.dummy_mean, dummy_std=0.0)
        self._ahead: tuple[Tensor, Tensor] | None = None
        kernels = context.kernels
        self._post_norm = kernels if isinstance(kernels, PostNormKernels) else None

    @property
    def factors(self) -> Tensor:
        """What a kernel multiplies by [size]: the weight, in the model's dtype."""
        return self.weight

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, size] -> [T, size]; computed in float32, rounded to x's dtype."""
        normed_TE = self.take(x_TE)
        if normed_TE is None:
            normed_TE = self.context.kernels.rms_norm(x_TE, self.factors, self.eps)
        return normed_TE

    def add_to(self, residual_TE: Tensor, x_TE: Tensor, following: RMSNorm | None) -> Tensor:
        """residual + norm(x), which `following` norms next. The residual is overwritten."""
        if self._post_norm is None or following is None:
            return residual_TE.add_(self(x_TE))
        residual_TE, normed_TE = self._post_norm.norm_add_norm(
            x_TE, self.factors, self.eps, residual_TE, following.factors, following.eps
        )
        following.put(residual_TE, normed_TE)
        return residual_TE

    def put(self, x_TE: Tensor, normed_TE: Tensor) -> None:
        """norm(x), which the kernel that made x has computed too, for the next reader of x."""
        self._ahead = x_TE, normed_TE

    def take(self, x_TE: Tensor) -> Tensor | None:
        """What was put for this very tensor, once; None: nothing was."""
        ahead = self._ahead
        if ahead is None:
            return None
        self._ahead = None
        return ahead[1] if ahead[0] is x_TE else None


class ZeroCenteredRMSNorm(RMSNorm):
    """x / sqrt(mean(x²) + eps) · (1 + weight), with 1 + weight in float32, as in Gemma."""

    dummy_mean = 0.0

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps)
        self._factors = torch.empty(size, dtype=torch.float32, device=context.device)

    def finalize(self) -> None:
        self._factors.copy_(self.weight).add_(1)

    @property
    def factors(self) -> Tensor:
        """1 + weight [size] in float32; right once the weights are loaded and finalised."""
        return self._factors
