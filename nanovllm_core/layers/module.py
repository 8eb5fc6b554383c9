"""The base of layers, and parameters that know how a checkpoint fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from nanovllm_core.layers.context import LayerContext
    from nanovllm_core.layers.matrix import WeightMatrix

_PINNED_BYTES = 16 << 20
_pinned = local()

ShardId = str | int | None
"""The part of a packed parameter that a checkpoint tensor is: "q", 0, or None for a whole one."""

WeightLoader = Callable[["ModelParameter", Tensor, ShardId], None]
"""Copies a whole checkpoint tensor's share of this rank into the parameter."""


class ModelParameter(nn.Parameter):
    """A parameter with its own `weight_loader(param, tensor, shard_id)`.

    `shard_shapes` gives, for each shard that must be loaded exactly once, the shape of the
    checkpoint's tensor, before it is split over ranks. `dummy_mean` and `dummy_std` are the normal
    distribution of its values where no checkpoint is loaded. With a `stacked_shape` the checkpoint
    may hold all shards of X.weight in one tensor of that shape, X_proj.
    """

    weight_loader: WeightLoader
    shard_shapes: Mapping[ShardId, tuple[int, ...]]
    dummy_mean: float
    dummy_std: float
    stacked_shape: tuple[int, int, int] | None = None


def make_parameter(
    context: LayerContext,
    shape: tuple[int, ...],
    weight_loader: WeightLoader | None = None,
    shard_shapes: Mapping[ShardId, tuple[int, ...]] | None = None,
    *,
    dummy_mean: float = 0.0,
    dummy_std: float = 0.02,
    data: Tensor | None = None,
) -> ModelParameter:
    """A parameter of this rank's `shape`, not yet filled, in `data` or in memory of its own.

    Without a loader, every rank holds the whole tensor of the checkpoint. A parameter that is split
    over ranks, or that holds several tensors, needs `weight_loader` and `shard_shapes`.
    `weight_loader(param, tensor, shard_id)` copies this rank's share of a whole tensor, on the CPU
    and in the checkpoint's dtype, into the parameter; loaders of other parameters may run beside it
    on other threads. `shard_shapes` maps each `shard_id` ("q", 0;
    None for a single tensor) to that tensor's shape. Without a checkpoint, values are normal with
    `dummy_mean` and `dummy_std`.
    """
    if data is None:
        data = torch.empty(shape, dtype=context.dtype, device=context.device)
    parameter = ModelParameter(data, requires_grad=False)
    parameter.weight_loader = weight_loader or (lambda param, tensor, _: copy_weight(param, tensor))
    parameter.shard_shapes = shard_shapes or {None: shape}
    parameter.dummy_mean = dummy_mean
    parameter.dummy_std = dummy_std
    return parameter


def copy_weight(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the checkpoint, or a part of one, to its place, in the place's dtype.

    To a GPU it goes piece by piece through pinned memory of the calling thread: a copy from where
    a file is mapped takes a lock of the driver, at 5 GB/s over all threads.
    """
    row_bytes = max(source[:1].nbytes, target[:1].nbytes) if source.dim() else 0
    if target.device.type != "cuda" or not 0 < row_bytes <= _PINNED_BYTES:
        target.copy_(source)
        return
    if not hasattr(_pinned, "bytes"):
        _pinned.bytes = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    num_rows = _PINNED_BYTES // row_bytes
    for there, here in zip(target.split(num_rows), source.split(num_rows), strict=True):
        pinned = _pinned.bytes[: there.nbytes].view(there.dtype).view(there.shape)
        there.copy_(pinned.copy_(here))


class Layer(nn.Module):
    """The base of every layer.

    Built once per worker, on the context's device, with parameters that are not filled yet; the
    weights are loaded next, then `finalize` is called. `forward` runs once per step: captured in
    decode steps on CUDA, eagerly in steps with prompts. It must not wait for the device.
    """

    dummy_std = 0.02
    """Of a weight matrix, where no checkpoint is loaded; see `make_parameter`."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.matrices: list[WeightMatrix] = []

    def finalize(self) -> None:
        """Called once, after the weights are loaded: the place to repack them for a kernel.

        By default by the layer's `matrices`, those that were made for it. What a captured forward
        reads must be in its place when this returns.
        """
        for matrix in self.matrices:
            matrix.finalize()

    if TYPE_CHECKING:  # nn.Module's own is typed to return Any

        def __call__(self, *args: Any) -> Tensor: ...


def finalize_layers(model: nn.Module) -> None:
    """Call `finalize` on every layer of a model; once, after its weights are loaded."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.finalize()
