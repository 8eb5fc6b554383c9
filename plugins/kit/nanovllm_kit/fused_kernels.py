"""A kernel set in torch that has every operation by which norms and activations are fused.

Layers reach these operations by paths of their own: a norm may be there before its reader asks.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.interfaces.kernels import (
    GatedKernels,
    GeluKernels,
    NormingKernels,
    PostNormKernels,
)
from nanovllm_core.kernels import TorchKernels


class FusedKernels(TorchKernels, GatedKernels, GeluKernels, NormingKernels, PostNormKernels):
    """As a set for GPUs: the residual is written in place, and norms are in other memory."""

    name = "fused torch"

    def gate_up(self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        return self.silu_and_mul(self.linear(x_TE, weight_2FE, bias_2F))

    def gelu_gate_up(
        self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None
    ) -> Tensor:
        gate_TF, up_TF = self.linear(x_TE, weight_2FE, bias_2F).float().chunk(2, dim=-1)
        return gelu(gate_TF, approximate="tanh").mul_(up_TF).to(x_TE.dtype)

    def linear_add_norm(
        self,
        x_TF: Tensor,
        weight_EF: Tensor,
        residual_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        residual_TE = self.linear_add(x_TF, weight_EF, residual_TE, bias_E)
        return residual_TE, super().rms_norm(residual_TE, norm_weight_E, eps)

    def norm_add_norm(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        residual_TE: Tensor,
        next_weight_E: Tensor,
        next_eps: float,
    ) -> tuple[Tensor, Tensor]:
        residual_TE.add_(super().rms_norm(x_TE, norm_weight_E, eps))
        return residual_TE, super().rms_norm(residual_TE, next_weight_E, next_eps)
