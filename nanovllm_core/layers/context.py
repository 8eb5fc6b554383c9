"""The context of layers: device, dtype, rank and kernels, passed down instead of global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.parallel import TensorParallel
from nanovllm_core.layers.matrix import Piece, Pieces, PlainMatrix, WeightMatrix
from nanovllm_core.layers.module import Layer


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
