"""The library of products loads itself, and each of its kernels, when they are first needed.

On an H200 cuBLAS takes 0.13 s for itself and 4 ms for a kernel, of which the steps of a small model
need a hundred. Captures would wait for them one by one; here they come while nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Literal

import torch
from torch import nn

from nanovllm_core.interfaces.kernels import Product
from nanovllm_core.layers import MergedColumnParallelLinear, RowParallelLinear
from nanovllm_core.layers.embedding import VocabParallel
from nanovllm_core.layers.module import Layer
from nanovllm_core.worker.graphs import StepKey

_WAKE_SECONDS = 60
"""A bound of the wait for the library."""


def wake_library(
    device: torch.device, stream: torch.cuda.Stream | None, dtype: torch.dtype
) -> Callable[[], None]:
    """Have the library load itself on a thread, on the stream of all later products.

    Gives the function that waits for it. On a CPU there is nothing to load.
    """

    def run() -> None:
        with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.stream(stream):
            x = torch.zeros((16, 16), device=device, dtype=dtype)
            torch.mm(x, x)  # what fails here fails again where it is needed

    if device.type != "cuda":
        return lambda: None
    thread = Thread(target=run, daemon=True)
    thread.start()
    return partial(thread.join, _WAKE_SECONDS)


def captured_products(module: nn.Module, keys: Collection[StepKey]) -> list[Product]:
    """The products of captured steps: one for each kind and shape of a model's plain matrices."""
    entries = {key.num_rows + (key.num_chunks if key.kind == "mixed" else 0) for key in keys}
    tokens = entries | {key.total_tokens for key in keys}
    found: dict[object, Product] = {}
    for layer in module.modules():
        if not isinstance(layer, Layer) or getattr(layer, "bias", None) is not None:
            continue
        rows = entries if isinstance(layer, VocabParallel) else tokens
        kind = _kind(layer)
        for weight in (matrix.tensor for matrix in layer.matrices):
            if weight is not None:
                product = Product(kind, weight, tuple(sorted(rows)))
                found.setdefault((kind, weight.shape, product.num_rows), product)
    return list(found.values())


def _kind(layer: Layer) -> Literal["linear", "add", "gate_up"]:
    if isinstance(layer, MergedColumnParallelLinear):
        return "gate_up"
    is_added = isinstance(layer, RowParallelLinear) and layer.context.tp.size == 1
    return "add" if is_added else "linear"
