"""What a test of a model or a layer stands on: a context to build in, a checkpoint to fill from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nanovllm_core.kernels.base import get_kernels
from nanovllm_core.layers import LayerContext, SingleRank, TensorParallel
from nanovllm_core.worker import load_weights

Model = TypeVar("Model", bound=nn.Module)
_ALONE = SingleRank()


def layer_context(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel = _ALONE,
) -> LayerContext:
    """The context that the runner would build layers in: the device's own kernel set."""
    device = torch.device(device)
    return LayerContext(device, dtype, tp, get_kernels(device))


def load_model(model_class: type[Model], folder: Path, context: LayerContext) -> Model:
    """A `CausalLM` built from a folder's config.json and filled from its safetensors files.

    Raises what the model raises for its config, and WeightsError for weights that do not fit.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    causal_lm: Any = model_class
    model: Model = causal_lm(config, context)
    load_weights(model, folder, tied=causal_lm.shape(config).tied_embeddings)
    return model
