"""Weights as objects: a matrix of a layer knows how it is stored, filled and multiplied.

A format of weights is a class of its own, which `LayerContext.make_matrix` makes for each layer:
layers, block operations and models call its methods and never see a tensor. `PlainMatrix` is the
format of checkpoints in floating point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.interfaces.kernels import (
    GatedKernels,
    GeluKernels,
    MixtureKernels,
    NormingKernels,
    Routing,
    RoutingKernels,
)
from nanovllm_core.layers.module import Layer, ModelParameter, ShardId, copy_weight, make_parameter

if TYPE_CHECKING:
    from nanovllm_core.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of one shard: `size` rows (or columns) of `full_size`, from `source` on.

    What lies beyond `full_size` is padding.
    """

    size: int
    source: int
    full_size: int


Pieces = Mapping[ShardId, Piece]
"""By shard of the checkpoint, in the order in which they lie here, one below the other."""


def make_split_parameter(
    context: LayerContext, rows: Pieces, columns: Piece | None = None, data: Tensor | None = None
) -> ModelParameter:
    """This rank's pieces of a matrix, or without `columns` of a vector; padding is loaded as 0.

    They lie in `data`, if it is given.
    """
    size = 0
    starts: dict[ShardId, int] = {}
    for shard_id, piece in rows.items():
        starts[shard_id] = size
        size += piece.size

    def load(parameter: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        piece = rows[shard_id]
        part = parameter[starts[shard_id] :][: piece.size]
        loaded = tensor[piece.source : piece.source + piece.size]
        if columns is not None:
            loaded = loaded.narrow(1, columns.source, columns.size)
        copy_weight(part[: len(loaded)], loaded)
        part[len(loaded) :].zero_()

    here = () if columns is None else (columns.size,)
    there = () if columns is None else (columns.full_size,)
    shapes = {shard_id: (piece.full_size, *there) for shard_id, piece in rows.items()}
    return make_parameter(context, (size, *here), load, shapes, data=data)


class WeightMatrix(ABC):
    """The weight W [out, in] of one layer, in some format, on this rank.

    Made by its layer's constructor. A subclass puts its parameters on the layer, named as in the
    checkpoint (`layer.weight = …`), so that they are found and filled as all others are. It must
    define `linear` and `embed`; the rest is made of these and of the kernel set, for a format to
    fuse. All methods promise of W what the kernel set's operations of the same names promise, and
    are captured as they are.
    """

    tensor: Tensor | None = None
    """W as one tensor in the model's dtype; None in a format that stores it otherwise. Only with it
    are a set's optional operations called, such as `NormingKernels.linear_add_norm`."""

    def __init__(self, layer: Layer, outputs: Pieces, inputs: Piece) -> None:
        """`outputs` and `inputs` say which part of the checkpoint's W this rank holds."""
        kernels = self.kernels = layer.context.kernels
        # Asked once: to look for a protocol's operations takes longer than a small product.
        self._norming = kernels if isinstance(kernels, NormingKernels) else None
        self._routing = kernels if isinstance(kernels, RoutingKernels) else None
        self._mixture = kernels if isinstance(kernels, MixtureKernels) else None
        self._gated = kernels if isinstance(kernels, GatedKernels) else None
        self._gelu = kernels if isinstance(kernels, GeluKernels) else None
        layer.matrices.append(self)

    def finalize(self) -> None:  # noqa: B027 - most formats store what was loaded
        """Called once, after the weights are loaded: the place to repack them for a kernel."""

    @property
    def streamed(self) -> Tensor | None:
        """The tensor that products of few rows read from its beginning; None: it is not said."""
        return self.tensor

    @abstractmethod
    def embed(self, ids_T: Tensor) -> Tensor:
        """Rows of W, int32 or int64 ids below out -> [T, in]."""

    @abstractmethod
    def linear(
        self, x_TE: Tensor, bias_X: Tensor | None = None, out_TX: Tensor | None = None
    ) -> Tensor:
        """x W^T + b -> [T, out], in `out_TX` if it is given, which may be float32."""

    def norm_linear(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, bias_X: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x)) -> [T, out]."""
        return self.linear(self.kernels.rms_norm(x_TE, norm_weight_E, eps), bias_X)

    def norm_gate_up(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, bias_2F: Tensor | None = None
    ) -> Tensor:
        """silu(gate) * up with gate, up = norm_linear(x), the gate first -> [T, out / 2]."""
        return self.kernels.silu_and_mul(self.norm_linear(x_TE, norm_weight_E, eps, bias_2F))

    def gate_up(self, x_TE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        """As `norm_gate_up`, of what is normed already -> [T, out / 2]."""
        return self.kernels.silu_and_mul(self.linear(x_TE, bias_2F))

    def gelu_gate_up(self, x_TE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        """As `gate_up`, with GELU by its approximation with tanh in SiLU's place."""
        gate_TF, up_TF = self.linear(x_TE, bias_2F).float().chunk(2, dim=-1)
        return gelu(gate_TF, approximate="tanh").mul_(up_TF).to(x_TE.dtype)

    def linear_add(self, x_TF: Tensor, residual_TE: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """residual + linear(x). The residual is overwritten: use what is returned."""
        return residual_TE.add_(self.linear(x_TF, bias_E))

    def linear_add_norm(
        self,
        x_TF: Tensor,
        residual_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """As `NormingKernels.linear_add_norm`. None: layers call `linear_add`, then a norm."""
        if self.tensor is None or self._norming is None:
            return None
        return self._norming.linear_add_norm(
            x_TF, self.tensor, residual_TE, norm_weight_E, eps, bias_E
        )

    def norm_route(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        routing: Routing,
        bias_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `RoutingKernels.norm_route`, of a router's W. None: the router calls the others."""
        if self.tensor is None or self._routing is None:
            return None
        return self._routing.norm_route(x_TE, norm_weight_E, eps, self.tensor, routing, bias_N)

    def norm_experts(
        self,
        x_TE: Tensor,
        norm_weight_E: Tensor,
        eps: float,
        routing: Routing,
        bias_N: Tensor | None,
        gate_up_N2FE: Tensor,
        down_NEF: Tensor,
        residual_TE: Tensor | None = None,
    ) -> Tensor | None:
        """As `MixtureKernels.norm_experts`, of a router's W. None: layers call the others."""
        if self.tensor is None or self._mixture is None:
            return None
        stacks = gate_up_N2FE, down_NEF
        return self._mixture.norm_experts(
            x_TE, norm_weight_E, eps, self.tensor, routing, bias_N, *stacks, residual_TE
        )


class PlainMatrix(WeightMatrix):
    """One tensor in the model's dtype, as in the checkpoint: every method is a kernel's call."""

    tensor: ModelParameter

    def __init__(self, layer: Layer, outputs: Pieces, inputs: Piece) -> None:
        super().__init__(layer, outputs, inputs)
        self.tensor = make_split_parameter(layer.context, outputs, inputs)
        self.tensor.dummy_std = layer.dummy_std
        layer.weight = self.tensor

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.kernels.embed(ids_T, self.tensor)

    def linear(
        self, x_TE: Tensor, bias_X: Tensor | None = None, out_TX: Tensor | None = None
    ) -> Tensor:
        return self.kernels.linear(x_TE, self.tensor, bias_X, out_TX)

    def norm_linear(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, bias_X: Tensor | None = None
    ) -> Tensor:
        return self.kernels.norm_linear(x_TE, norm_weight_E, eps, self.tensor, bias_X)

    def norm_gate_up(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, bias_2F: Tensor | None = None
    ) -> Tensor:
        return self.kernels.norm_gate_up(x_TE, norm_weight_E, eps, self.tensor, bias_2F)

    def gate_up(self, x_TE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        if self._gated is None:
            return super().gate_up(x_TE, bias_2F)
        return self._gated.gate_up(x_TE, self.tensor, bias_2F)

    def gelu_gate_up(self, x_TE: Tensor, bias_2F: Tensor | None = None) -> Tensor:
        if self._gelu is None:
            return super().gelu_gate_up(x_TE, bias_2F)
        return self._gelu.gelu_gate_up(x_TE, self.tensor, bias_2F)

    def linear_add(self, x_TF: Tensor, residual_TE: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return self.kernels.linear_add(x_TF, self.tensor, residual_TE, bias_E)
