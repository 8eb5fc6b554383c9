"""The kernel sets' suite: operations that norm, on states in the thousands, as models have them.

float16 cannot hold the squares of 256 and more, so a norm sums them in float32 wherever it is.
Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, NormingKernels, PostNormKernels
from nanovllm_kit.kernel_calls import REFERENCE, assert_equal, random, run
from nanovllm_kit.kernel_experts import NUM_EXPERTS, ROUTERS
from nanovllm_kit.kernel_mixture import RULES, at_once, make_mixture, make_rows, one_by_one
from nanovllm_kit.kernel_routing import norm_route

LARGE = 1024.0
"""A power of two rounds nothing."""
EPS = 1e-6
HIDDEN, OUTPUTS = 1100, 200
few_and_many = pytest.mark.parametrize("rows", [1, 2, 4, 40])
"""Sets have kernels of their own for few rows."""


class LargeStateChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures."""

    @pytest.mark.parametrize("name", ["norm_linear", "norm_gate_up"])
    @few_and_many
    def test_a_product_of_large_states_norms_them_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, name: str, rows: int
    ) -> None:
        """As `rms_norm` does."""
        weight_XE = random(OUTPUTS, HIDDEN, device=device, dtype=dtype, seed=1) / HIDDEN**0.5
        arguments = (_large(rows, device, dtype), _norm(device, dtype), EPS, weight_XE)
        assert_equal(run(kernels, name, *arguments), getattr(REFERENCE, name)(*arguments))

    @few_and_many
    def test_a_large_sum_behind_a_product_is_normed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Of a residual that is large already."""
        if not isinstance(kernels, NormingKernels):
            pytest.skip(f"{kernels.name} has no linear_add_norm")
        x_TF = random(rows, HIDDEN, device=device, dtype=dtype, seed=1)
        weight_EF = random(HIDDEN, HIDDEN, device=device, dtype=dtype, seed=2)
        norm_E, residual_TE = _norm(device, dtype), _large(rows, device, dtype)
        result = kernels.linear_add_norm(x_TF, weight_EF, residual_TE, norm_E, EPS)
        if result is None:
            pytest.skip(f"linear_add_norm of {kernels.name} is not for {rows} rows")
        sum_TE, normed_TE = result
        assert_equal(normed_TE, REFERENCE.rms_norm(sum_TE, norm_E, EPS))

    @few_and_many
    def test_large_states_around_a_sum_are_normed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """The addend and the sum; their norms are apart, so each is seen."""
        if not isinstance(kernels, PostNormKernels):
            pytest.skip(f"{kernels.name} has no norm_add_norm")
        x_TE, norm_E = _large(rows, device, dtype), _norm(device, dtype)
        for residual_TE in (torch.zeros_like(x_TE), x_TE.flip(1)):
            sum_TE, normed_TE = kernels.norm_add_norm(
                x_TE, norm_E, EPS, residual_TE.clone(), norm_E, EPS
            )
            assert_equal(sum_TE, residual_TE + REFERENCE.rms_norm(x_TE, norm_E, EPS))
            assert_equal(normed_TE, REFERENCE.rms_norm(sum_TE, norm_E, EPS))

    @few_and_many
    def test_large_states_are_normed_in_float32_before_their_experts_are_chosen(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Seen in the normed states; the choice follows from them."""
        x_TE, norm_E = _large(rows, device, dtype), _norm(device, dtype)
        weight_NE = torch.eye(NUM_EXPERTS, HIDDEN, device=device, dtype=dtype)
        routing = next(iter(ROUTERS.values()))
        *_, normed_TE = norm_route(kernels, x_TE, norm_E, weight_NE, routing)
        assert_equal(normed_TE, REFERENCE.rms_norm(x_TE, norm_E, EPS))

    @few_and_many
    def test_a_mixture_of_large_states_norms_them_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """By the first rule: the norm is before any choice."""
        mixture = make_mixture(next(iter(RULES)), device, dtype)
        x_TE = make_rows(rows, mixture) * LARGE
        assert_equal(at_once(kernels, mixture, x_TE), one_by_one(mixture, x_TE))


def _large(rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return random(rows, HIDDEN, device=device, dtype=dtype) * LARGE


def _norm(device: torch.device, dtype: torch.dtype) -> Tensor:
    return 1 + random(HIDDEN, device=device, dtype=dtype, seed=9) / 8
