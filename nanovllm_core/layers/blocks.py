"""Block operations: the seams at which norm, GEMM, activation and residual can be fused.

A model calls these instead of its layers one by one; the kernel set decides what is fused.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm_core.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from nanovllm_core.layers.norm import RMSNorm


def norm_linear(x_TE: Tensor, norm: RMSNorm, linear: ColumnParallelLinear) -> Tensor:
    """linear(norm(x)); x is left as it is."""
    return linear.matrix.norm_linear(x_TE, norm.factors, norm.eps, linear.bias)


def linear_add(x_TF: Tensor, linear: RowParallelLinear, residual_TE: Tensor) -> Tensor:
    """residual + linear(x). The residual is overwritten: use only what is returned."""
    return linear.add_to(x_TF, residual_TE)


def gated_mlp(
    residual_TE: Tensor, norm: RMSNorm, gate_up: MergedColumnParallelLinear, down: RowParallelLinear
) -> Tensor:
    """residual + down(silu(gate) * up) with gate, up = gate_up(norm(residual)).

    The residual is overwritten: use only what is returned.
    """
    hidden_TF = gate_up.matrix.norm_gate_up(residual_TE, norm.factors, norm.eps, gate_up.bias)
    return linear_add(hidden_TF, down, residual_TE)
