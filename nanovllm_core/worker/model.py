"""Builds the model that a checkpoint names, and fills its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.layers import AttentionLayer, LayerContext, TensorParallel, finalize_layers
from nanovllm_core.registry.objects import load_object, make_plugin
from nanovllm_core.worker.progress import counting
from nanovllm_core.worker.weights import check_finite, init_dummy_weights, load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on its device. The module is a `CausalLM`.

    `shape` is the model plugin's, but its attention layers have the heads of this rank.
    """

    module: nn.Module
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype


def load_model(setup: WorkerSetup, kernels: KernelSet, tp: TensorParallel) -> LoadedModel:
    """Build the model on its device, load (or invent) its weights, pack them."""
    device, dtype = torch.device(setup.device), getattr(torch, setup.dtype)
    context = LayerContext(device=device, dtype=dtype, tp=tp, kernels=kernels)
    shape: ModelShape = load_object(setup.model).shape(setup.model_config)
    with torch.inference_mode():
        module: nn.Module = make_plugin(setup.model, setup.model_config, context)
        if setup.config.load_format == "dummy":
            init_dummy_weights(module, seed=setup.config.seed)
        else:
            with counting("Loading weights") as progress:
                load_weights(
                    module, setup.checkpoint, tied=shape.tied_embeddings, progress=progress
                )
            check_finite(module, setup.checkpoint)
        finalize_layers(module)
    return LoadedModel(module, _own_shape(module, shape, tp.size), device, dtype)


def _own_shape(module: nn.Module, shape: ModelShape, tp_size: int) -> ModelShape:
    """The shape with this rank's heads, checked against the layers of the model that was built.

    The backends were asked at start by the shape alone: a layer that differs from it is refused,
    not ignored in silence.
    """
    own = shape.on_rank(tp_size)
    stated = own.attention_shapes
    built = tuple(one.shape for one in module.modules() if isinstance(one, AttentionLayer))
    if len(built) != len(stated):
        raise UnsupportedError(
            f"the model has {len(built)} attention layers, and the model plugin's shape() states "
            f"{len(stated)}; correct the model plugin"
        )
    for index, (layer, expected) in enumerate(zip(built, stated, strict=True)):
        if layer != expected:
            raise UnsupportedError(
                f"attention layer {index} has {layer}, not {expected} as the model plugin's "
                "shape() says for this rank: the backends are chosen by shape(); correct the model "
                "plugin, and state attention_layers there where layers differ"
            )
    return own
