"""What a test of a model or a layer stands on: a context to build in, a checkpoint to fill from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nanovllm_core.config import KernelSettings
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.layers import LayerContext, SingleRank, TensorParallel
from nanovllm_core.selection import KernelTarget, compute_capability, select_kernels
from nanovllm_core.worker import load_weights
from nanovllm_kit.enabled import enabled_plugins

Model = TypeVar("Model", bound=nn.Module)
_ALONE = SingleRank()


def layer_context(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel = _ALONE,
) -> LayerContext:
    """The context that the runner would build layers in: the kernel set that `auto` takes."""
    device, plugins = torch.device(device), enabled_plugins()
    target = KernelTarget(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        compute_capability=compute_capability(str(device)),
    )
    chosen = select_kernels(plugins, KernelSettings(), target).chosen
    return LayerContext(device, dtype, tp, plugins.make(chosen, device))


def load_model(model_class: type[Model], folder: Path, context: LayerContext) -> Model:
    """A `CausalLM` built from a folder's config.json and filled from its safetensors files.

    Raises what the model raises for its config, and WeightsError for weights that do not fit.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    causal_lm: Any = model_class
    model: Model = causal_lm(NoOptions(), config, context)
    load_weights(model, folder, tied=causal_lm.shape(config).tied_embeddings)
    return model
