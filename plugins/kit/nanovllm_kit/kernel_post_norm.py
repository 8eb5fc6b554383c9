"""The kernel sets' suite: operations of models such as Gemma, which a set may have.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.interfaces.kernels import GeluKernels, KernelSet, PostNormKernels
from nanovllm_kit.kernel_calls import REFERENCE, assert_equal, random
from nanovllm_kit.numerics import assert_close_report

GELU_SHAPES = [(1, 64, 48), (2, 1100, 200), (4, 64, 48), (17, 1100, 200), (129, 1100, 200)]
"""(rows, inputs, outputs of gate and up), in whole tiles or not."""
POST_NORM_SHAPES = [(1, 16), (3, 96), (17, 1100), (129, 1100), (513, 96)]
"""(rows, size), powers of two or not."""
EPS, NEXT_EPS = 0.05, 0.5
"""Both are about the mean squares of what is normed, so that each counts."""


class PostNormChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures. Skipped by sets without them."""

    @pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
    @pytest.mark.parametrize("shape", GELU_SHAPES, ids=str)
    def test_a_product_gated_by_gelu_equals_the_operations_one_by_one(
        self,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        biased: bool,
    ) -> None:
        """Gate and up are rounded before the activation, and exact GELU is another function. A
        second call has the same bits, and inputs stay as they are."""
        if not isinstance(kernels, GeluKernels):
            pytest.skip(f"{kernels.name} has no gelu_gate_up")
        rows, inputs, outputs = shape
        x_TE = random(rows, 2 * inputs, device=device, dtype=dtype)[:, :inputs]
        weight_2FE = random(outputs, inputs, device=device, dtype=dtype, seed=1)
        weight_2FE *= 2 / inputs**0.5
        bias_2F = random(outputs, device=device, dtype=dtype, seed=2) if biased else None
        read = [x for x in (x_TE, weight_2FE, bias_2F) if x is not None]
        before = [x.clone() for x in read]
        actual, again = (kernels.gelu_gate_up(x_TE, weight_2FE, bias_2F) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(read, before, strict=True)), (
            "it changed inputs"
        )
        gate_TF, up_TF = REFERENCE.linear(x_TE, weight_2FE, bias_2F).float().chunk(2, dim=-1)
        assert_equal(actual, (gelu(gate_TF, approximate="tanh") * up_TF).to(dtype))
        assert torch.equal(actual, again), "equal inputs gave other bits"

    def test_a_gate_of_gelu_stays_finite(self, kernels: KernelSet, device: torch.device) -> None:
        """The exponential of a large gate overflows; the result does not."""
        if not isinstance(kernels, GeluKernels):
            pytest.skip(f"{kernels.name} has no gelu_gate_up")
        gates = torch.tensor([[-1e4], [-30.0], [0.0], [30.0], [1e4]], device=device)
        weight_2FE = torch.ones((2, 1), device=device)
        expected = gates.clamp(min=0) ** 2
        assert_close_report(kernels.gelu_gate_up(gates, weight_2FE), expected, rel_norm=1e-6)

    @pytest.mark.parametrize("shape", POST_NORM_SHAPES, ids=str)
    def test_a_norm_a_sum_and_a_norm_at_once_equal_the_three_one_by_one(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
    ) -> None:
        """The sum lies in the residual, here with gaps between its rows, and its norm elsewhere.
        Weights are in the dtype of x, or in float32, which rounds each norm once."""
        if not isinstance(kernels, PostNormKernels):
            pytest.skip(f"{kernels.name} has no norm_add_norm")
        rows, size = shape
        x_TE = random(rows, 2 * size, device=device, dtype=dtype)[:, :size]
        residual_TE = random(rows, 2 * size, device=device, dtype=dtype, seed=1)
        for weight_dtype in {dtype, torch.float32}:
            weight_E = random(size, device=device, seed=2).to(weight_dtype)
            next_E = random(size, device=device, seed=3).to(weight_dtype)
            read = (x_TE, weight_E, next_E)
            before = [x.clone() for x in read]
            calls = [residual_TE.clone()[:, :size] for _ in range(2)]
            (sum_TE, normed_TE), again = (
                kernels.norm_add_norm(x_TE, weight_E, EPS, call_TE, next_E, NEXT_EPS)
                for call_TE in calls
            )
            assert all(torch.equal(x, y) for x, y in zip(read, before, strict=True)), (
                "it changed inputs"
            )
            assert sum_TE.data_ptr() == calls[0].data_ptr(), "the sum has other memory"
            assert _memory(normed_TE) not in {_memory(x) for x in (calls[0], *read)}
            addend_TE = REFERENCE.rms_norm(x_TE, weight_E, EPS)
            exact = max(torch.finfo(dtype).eps / 8, 3e-6)
            assert_close_report(sum_TE, residual_TE[:, :size] + addend_TE, rel_norm=exact)
            expected_TE = REFERENCE.rms_norm(sum_TE, next_E, NEXT_EPS)
            assert_close_report(normed_TE, expected_TE, rel_norm=exact)
            assert torch.equal(sum_TE, again[0]), "equal inputs gave other bits"
            assert torch.equal(normed_TE, again[1]), "equal inputs gave other bits"


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
