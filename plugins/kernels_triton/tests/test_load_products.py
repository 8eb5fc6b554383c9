"""What a warm start has cuBLAS load: the products that cuBLAS computes, and no others."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

pytest.importorskip("triton", reason="imports Triton kernels")

from nanovllm_core.api import Product
from nanovllm_kernels_triton import kernel_set, loading
from nanovllm_kernels_triton.kernel_set import TritonKernels


class LaunchedError(Exception):
    """A kernel of ours is launched."""


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["linear", "add", "add_norm", "gate_up"]),
    outputs=st.sampled_from([64, 1024, 4096, 6144]),
    inputs=st.sampled_from([64, 1024, 2048]),
    rows=st.sampled_from([1, 2, 16, 40, 64, 72, 128, 136, 256, 384]),
)
def test_products_are_loaded_where_a_step_leaves_them_to_cublas(
    kind: Literal["linear", "add", "add_norm", "gate_up"], outputs: int, inputs: int, rows: int
) -> None:
    """A kernel that no step needs would cost a start 4 ms; one that is missing, its capture."""
    weight = torch.zeros((outputs, inputs), dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        loaded = calls_of_cublas(patch)
        TritonKernels().load_products([Product(kind, weight, (rows,))])
        expected, loaded[:] = loaded[:], []
        try:
            run(TritonKernels(), kind, weight, rows)
        except LaunchedError:
            assert expected == []
        else:
            assert expected == loaded
            assert len(loaded) == 1


def test_kinds_of_a_newer_core_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = calls_of_cublas(monkeypatch)
    kind: Any = "of a newer core"
    weight = torch.zeros((64, 64), dtype=torch.bfloat16)
    TritonKernels().load_products([Product(kind, weight, (256,)), Product("add", weight, (256,))])
    assert loaded == [("addmm", (256, 64))]


def calls_of_cublas(patch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The products of torch from now on, by operation and shape of x.

    Kernels of ours raise LaunchedError.
    """
    calls: list[tuple[str, tuple[int, ...]]] = []
    addmm_ = torch.Tensor.addmm_

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
        calls.append(("mm", tuple(x.shape)))
        return torch.nn.functional.linear(x, weight)

    def mm(x: torch.Tensor, weight: torch.Tensor, out: object = None) -> torch.Tensor:
        calls.append(("mm", tuple(x.shape)))
        return x @ weight

    def add(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(("addmm", tuple(x.shape)))
        return addmm_(out, x, weight)

    def launch(*_: object, **__: object) -> Any:
        raise LaunchedError

    patch.setattr(loading, "linear", linear)
    patch.setattr(torch, "mm", mm)
    patch.setattr(torch.Tensor, "addmm_", add)
    patch.setattr(kernel_set.LinearLauncher, "run", launch)
    patch.setattr(kernel_set.LinearLauncher, "run_parts", launch)
    patch.setattr(TritonKernels, "rms_norm", lambda self, x, *_: x)
    patch.setattr(TritonKernels, "silu_and_mul", lambda self, x: x)
    return calls


def run(kernels: TritonKernels, kind: str, weight: torch.Tensor, rows: int) -> None:
    """The operations of a step for which such a product stands."""
    outputs, inputs = weight.shape
    x, norm = torch.zeros((rows, inputs), dtype=weight.dtype), torch.ones(inputs)
    if kind == "linear":
        kernels.linear(x, weight)
    elif kind == "gate_up":
        kernels.norm_gate_up(x, norm, 1e-6, weight)
    else:
        residual = torch.zeros((rows, outputs), dtype=weight.dtype)
        norm = torch.ones(outputs)
        if kind == "add" or kernels.linear_add_norm(x, weight, residual, norm, 1e-6) is None:
            kernels.linear_add(x, weight, residual)
