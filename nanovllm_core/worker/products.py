"""cuBLAS loads itself, and each of its kernels, when they are first needed.

On an H200 it takes 0.13 s for itself and 4 ms for a kernel, of which the steps of a small model
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
from nanovllm_core.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanovllm_core.layers.module import Layer
from nanovllm_core.worker.graphs import StepKey

_WAKE_SECONDS = 60
"""A bound of the wait for it."""


def wake_library(
    device: torch.device, stream: torch.cuda.Stream | None, dtype: torch.dtype
) -> Callable[[], None]:
    """Have cuBLAS load itself on a thread, on the stream of all later products.

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
    """The products of captured steps: one for each kind and shape of a model's plain matrices.

    Behind its attention the last layer has a row for each entry alone, and so has the head.
    """
    entries = {key.num_rows + (key.num_chunks if key.kind == "mixed" else 0) for key in keys}
    tokens = {key.total_tokens for key in keys}
    found: dict[object, Product] = {}
    for layer in module.modules():
        if not isinstance(layer, Layer):
            continue
        kind = _kind(layer)
        if getattr(layer, "bias", None) is not None and not kind.startswith("add"):
            continue
        rows = tokens if isinstance(layer, QKVParallelLinear) else tokens | entries
        if isinstance(layer, VocabParallelEmbedding | ParallelLMHead):
            rows = entries
        for weight in (matrix.tensor for matrix in layer.matrices):
            if weight is not None:
                product = Product(kind, weight, tuple(sorted(rows)))
                found.setdefault((kind, weight.shape, product.num_rows), product)
    return list(found.values())


def _kind(layer: Layer) -> Literal["linear", "add", "add_norm", "gate_up"]:
    if isinstance(layer, MergedColumnParallelLinear):
        return "gate_up"
    if isinstance(layer, RowParallelLinear) and layer.context.tp.size == 1:
        return "add" if layer.sum.norm is None or layer.bias is not None else "add_norm"
    return "linear"
