"""Block operations: the seams at which norm, GEMM, activation and residual can be fused.

A model calls these instead of its layers one by one; the kernel set decides what is fused.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Announced(Protocol):
    """A block that returns a residual and may sum it over ranks."""

    def announce(self, norm: RMSNorm) -> None:
        """`norm` is the next reader of the residual that the block returns."""


def announce_norm(block: nn.Module, norm: RMSNorm) -> None:
    """Tell a block, once, that `norm` is the next reader of its residual, if it wants to know.

    Ranks, or a kernel set, may then norm the sum where they sum it. Nothing may write to the
    residual in between.
    """
    if isinstance(block, Announced):
        block.announce(norm)


@runtime_checkable
class Fetching(Protocol):
    """A block whose kernels have time to fetch a weight that another block reads."""

    def announce_next(self, matrix: WeightMatrix) -> None:
        """The next product is that by `matrix`."""


@runtime_checkable
class Starting(Protocol):
    """A block that says which product it starts with."""

    @property
    def first_matrix(self) -> WeightMatrix:
        """The matrix of that product."""


def announce_next(block: nn.Module, following: nn.Module) -> None:
    """Tell a block, once, which product starts the one behind it, where both have to do with it."""
    if isinstance(block, Fetching) and isinstance(following, Starting):
        block.announce_next(following.first_matrix)
