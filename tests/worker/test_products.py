"""The products of captured steps, as a start has a library load them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    ColumnParallelLinear,
    LayerContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SingleRank,
    VocabParallelEmbedding,
)
from nanovllm_core.worker import products
from nanovllm_core.worker.graphs import StepKey
from nanovllm_core.worker.products import captured_products, wake_library

KEYS = [StepKey.decode(1), StepKey.decode(96), StepKey("mixed", 128, 8)]


def context(size: int = 1) -> LayerContext:
    tp: Any = SingleRank() if size == 1 else SimpleNamespace(rank=0, size=size)
    return LayerContext(torch.device("cpu"), torch.float32, tp, TorchKernels())


def found(*layers: torch.nn.Module) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [
        (one.kind, tuple(one.weight.shape), one.num_rows)
        for one in captured_products(torch.nn.ModuleList(layers), KEYS)
    ]


def test_each_kind_and_shape_of_a_model_is_a_product_once() -> None:
    """The head has a row for each entry, q, k, v one for each token, other layers either.

    For what has a bias a library has another kernel, unless it is added to the residual, where sets
    may decline to norm it. A tied head has its embedding's weight.
    """
    one = context()
    entries, tokens, both = (1, 16, 96), (1, 96, 136), (1, 16, 96, 136)
    embedding = VocabParallelEmbedding(one, 1000, 32)
    layers = [
        layer
        for _ in range(2)
        for layer in (
            ColumnParallelLinear(one, 32, 48),
            RowParallelLinear(one, 48, 32),
            MergedColumnParallelLinear(one, 32, (64, 64)),
        )
    ]
    head = ParallelLMHead(one, 1000, 32, tied_to=embedding)
    biased = ColumnParallelLinear(one, 32, 56, bias=True), RowParallelLinear(one, 56, 32, bias=True)
    announced = RowParallelLinear(one, 64, 32), RowParallelLinear(one, 72, 32, bias=True)
    for layer in announced:
        layer.sum.norm = RMSNorm(one, 32, 1e-6)
    qkv = QKVParallelLinear(one, 32, 4, 2, 8)
    assert found(embedding, *layers, head, *biased, *announced, qkv) == [
        ("linear", (1000, 32), entries),
        ("linear", (48, 32), both),
        ("add", (32, 48), both),
        ("gate_up", (128, 32), both),
        ("add", (32, 56), both),
        ("add_norm", (32, 64), both),
        ("add", (32, 72), both),
        ("linear", (64, 32), tokens),
    ]


def test_what_ranks_sum_is_no_product_that_adds() -> None:
    """Its part is summed over ranks first."""
    assert [kind for kind, *_ in found(RowParallelLinear(context(2), 48, 32))] == ["linear"]


def test_a_cpu_has_no_library_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "Thread", None)
    wake_library(torch.device("cpu"), None, torch.float32)()
