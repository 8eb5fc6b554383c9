"""Block operations: the seams at which norm, GEMM, activation and residual can be fused.

A model calls these instead of its layers one by one; the kernel set decides what is fused.
"""

from __future__ import annotations

from torch import Tensor, nn

from nanovllm_core.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from nanovllm_core.layers.matrix import WeightMatrix
from nanovllm_core.layers.norm import RMSNorm


def norm_linear(x_TE: Tensor, norm: RMSNorm, linear: ColumnParallelLinear) -> Tensor:
    """linear(norm(x)); x is left as it is."""
    normed_TE = norm.take(x_TE)
    if normed_TE is not None:
        return linear.matrix.linear(normed_TE, linear.bias)
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
    normed_TE = norm.take(residual_TE)
    if normed_TE is not None:
        hidden_TF = gate_up.matrix.gate_up(normed_TE, gate_up.bias)
    else:
        hidden_TF = gate_up.matrix.norm_gate_up(residual_TE, norm.factors, norm.eps, gate_up.bias)
    return linear_add(hidden_TF, down, residual_TE)


def gelu_gate_up(x_TE: Tensor, norm: RMSNorm, gate_up: MergedColumnParallelLinear) -> Tensor:
    """gelu(gate) * up with gate, up = gate_up(norm(x)), by GELU's approximation with tanh."""
    return gate_up.matrix.gelu_gate_up(norm(x_TE), gate_up.bias)


def norm_add(
    x_TE: Tensor, norm: RMSNorm, residual_TE: Tensor, following: RMSNorm | None = None
) -> Tensor:
    """residual + norm(x), for models that norm a block's result; `following` norms the sum next.

    The residual is overwritten: use only what is returned. Nothing may write to it before
    `following` reads it, for its norm may be there already; None: no norm reads it next.
    """
    return norm.add_to(residual_TE, x_TE, following)


def announce_norm(block: nn.Module, norm: RMSNorm) -> None:
    """Tell a block, once, that `norm` reads next the residual that it returns.

    By its method `announce(norm)`, if it has one. Ranks, or a kernel set, may then norm the sum
    where they sum it. Nothing may write to the residual in between.
    """
    if (announce := getattr(block, "announce", None)) is not None:
        announce(norm)


def announce_next(block: nn.Module, following: nn.Module) -> None:
    """Tell a block, once, which product starts the one behind it, for its kernels to fetch.

    By its method `announce_next(matrix)`, if it has one and `following` has a `first_matrix`, the
    matrix of the product that it starts with.
    """
    announce = getattr(block, "announce_next", None)
    matrix: WeightMatrix | None = getattr(following, "first_matrix", None)
    if announce is not None and matrix is not None:
        announce(matrix)
