"""The context of layers: device, dtype, rank and kernels, passed down instead of global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.layers.matrix import Piece, Pieces, PlainMatrix, WeightMatrix
from nanovllm_core.layers.module import Layer


class TensorParallel(Protocol):
    """The group of ranks that share every layer. All ranks call the same collectives in order.

    Called inside a layer's forward, so captured in decode steps on CUDA.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank; `x` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, of equal shapes, side by side along the last dimension."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A group of one."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Everything a layer needs to know of the world when it is built.

    Made once per worker. `device` and `dtype` are those of weights and activations; `tp` is the
    group of ranks (`SingleRank()` alone), `kernels` the configured kernel set. `make_matrix` makes
    the weight of each layer that has one, from the arguments of `WeightMatrix`: its format.
    """

    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel
    kernels: KernelSet
    make_matrix: Callable[[Layer, Pieces, Piece], WeightMatrix] = PlainMatrix

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total`; ArchitectureError where it cannot be split evenly."""
        if total % self.tp.size != 0:
            raise ArchitectureError(
                f"{what} ({total}) must be divisible by tensor_parallel_size ({self.tp.size}); "
                "choose a size that divides it"
            )
        return total // self.tp.size
