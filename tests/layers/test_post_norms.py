"""The block operations of models such as Gemma: one by one, or by a set that has them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.api import KernelSet
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    LayerContext,
    MergedColumnParallelLinear,
    RMSNorm,
    SingleRank,
    ZeroCenteredRMSNorm,
    gelu_gate_up,
    norm_add,
    norm_linear,
)
from nanovllm_kit.fused_kernels import FusedKernels

SIZE, HIDDEN, ROWS = 24, 40, 5
CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


class OneByOne(TorchKernels):
    """Lists the norms that take a kernel of their own."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        CALLS.append("rms_norm")
        return super().rms_norm(x_TE, weight_E, eps)


class AtOnce(OneByOne, FusedKernels):
    """A set that has both operations, and lists their calls."""

    def gelu_gate_up(self, *arguments: Any) -> Tensor:
        CALLS.append("gelu_gate_up")
        return super().gelu_gate_up(*arguments)

    def norm_add_norm(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        CALLS.append("norm_add_norm")
        return super().norm_add_norm(*arguments)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_context(kernels: KernelSet) -> LayerContext:
    return LayerContext(torch.device("cpu"), torch.float32, SingleRank(), kernels)


def make_norm(context: LayerContext, kind: type[RMSNorm], eps: float, seed: int) -> RMSNorm:
    norm = kind(context, SIZE, eps)
    norm.weight.data.copy_(random(SIZE, seed=seed))
    norm.finalize()
    return norm


@pytest.mark.parametrize("kind", [RMSNorm, ZeroCenteredRMSNorm])
def test_a_block_s_result_is_normed_added_and_normed_for_its_reader(kind: type[RMSNorm]) -> None:
    """Each norm has its own weight and epsilon; a set with the operation norms nothing apart."""
    results = []
    for kernels in (OneByOne(), AtOnce()):
        context = make_context(kernels)
        norm = make_norm(context, kind, 0.5, seed=1)
        following = make_norm(context, kind, 0.1, seed=2)
        gate_up = MergedColumnParallelLinear(context, SIZE, (HIDDEN, HIDDEN))
        gate_up.weight.data.copy_(random(2 * HIDDEN, SIZE, seed=3))
        residual_TE = random(ROWS, SIZE, seed=4)
        total_TE = norm_add(random(ROWS, SIZE, seed=5), norm, residual_TE, following)
        results.append((total_TE.clone(), norm_linear(total_TE, following, gate_up)))
        assert total_TE.data_ptr() == residual_TE.data_ptr()
    assert CALLS == ["rms_norm", "rms_norm", "norm_add_norm"]
    for one_by_one, at_once in zip(*results, strict=True):
        assert torch.equal(one_by_one, at_once)
    weight = random(SIZE, seed=1) + (kind is ZeroCenteredRMSNorm)
    x_TE = random(ROWS, SIZE, seed=5)
    normed_TE = x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + 0.5) * weight
    torch.testing.assert_close(results[0][0], random(ROWS, SIZE, seed=4) + normed_TE)


def test_a_norm_that_is_there_already_is_for_this_sum_alone() -> None:
    """Another residual is normed; so is this one when it is read a second time."""
    context = make_context(AtOnce())
    norm, following = (make_norm(context, RMSNorm, 1e-6, seed=seed) for seed in (1, 2))
    total_TE = norm_add(random(ROWS, SIZE, seed=3), norm, random(ROWS, SIZE, seed=4), following)
    first_TE = following(total_TE)
    assert CALLS == ["norm_add_norm"]
    assert torch.equal(following(total_TE), first_TE)
    assert CALLS == ["norm_add_norm", "rms_norm"]
    norm_add(random(ROWS, SIZE, seed=3), norm, total_TE, following)
    other_TE = random(ROWS, SIZE, seed=6)
    torch.testing.assert_close(following(other_TE), TorchKernels().rms_norm(
        other_TE, following.factors, 1e-6
    ))  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_are_gated_by_gelu_with_or_without_an_operation_of_the_set(
    biased: bool, dtype: torch.dtype
) -> None:
    """By the approximation with tanh, in float32, of what the norm left."""
    results = []
    for kernels in (OneByOne(), AtOnce()):
        context = LayerContext(torch.device("cpu"), dtype, SingleRank(), kernels)
        norm = make_norm(context, RMSNorm, 1e-6, seed=1)
        gate_up = MergedColumnParallelLinear(context, SIZE, (HIDDEN, HIDDEN), bias=biased)
        gate_up.weight.data.copy_(random(2 * HIDDEN, SIZE, seed=2))
        if gate_up.bias is not None:
            gate_up.bias.data.copy_(random(2 * HIDDEN, seed=3))
        results.append(gelu_gate_up(random(ROWS, SIZE, seed=4).to(dtype), norm, gate_up))
    assert CALLS == ["rms_norm", "rms_norm", "gelu_gate_up"]
    normed_TE = norm(random(ROWS, SIZE, seed=4).to(dtype))
    product = TorchKernels().linear(normed_TE, gate_up.weight, gate_up.bias).float()
    gate_TF, up_TF = product.chunk(2, dim=-1)
    expected = (gelu(gate_TF, approximate="tanh") * up_TF).to(dtype)
    assert torch.equal(results[0], expected)
    torch.testing.assert_close(results[1], expected)
