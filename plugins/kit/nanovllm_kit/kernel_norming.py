"""The part of the kernel sets' suite about `linear_add_norm`, which a set may have.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, NormingKernels
from nanovllm_kit.kernel_calls import REFERENCE, assert_equal, random
from nanovllm_kit.numerics import assert_close_report

SHAPES = [(1, 64, 48), (5, 64, 48), (3, 1100, 200), (17, 1100, 200), (40, 2100, 70), (129, 96, 48)]
"""(rows, inputs, outputs): few and many rows, in whole tiles or not, of few and of many inputs."""
EPS = 0.05
"""About the mean square of the sums, so that it counts."""


class NormingChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures. Skipped by sets without it."""

    @pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_a_product_and_a_norm_at_once_equal_the_two_one_by_one(
        self,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        biased: bool,
    ) -> None:
        """The sum lies in the residual, here with gaps between its rows, and its norm elsewhere. A
        second call has the same bits. A set that declines has changed nothing."""
        if not isinstance(kernels, NormingKernels):
            pytest.skip(f"{kernels.name} has no linear_add_norm")
        rows, inputs, outputs = shape
        x_TF = (random(rows, 2 * inputs, device=device, dtype=dtype) * 0.3)[:, :inputs]
        weight_EF = random(outputs, inputs, device=device, dtype=dtype, seed=1) / inputs**0.5
        wide_E = random(outputs, device=device, seed=2)
        norm_E = wide_E.to(dtype)
        bias_E = random(outputs, device=device, dtype=dtype, seed=3) / 4 if biased else None
        read = [x for x in (x_TF, weight_EF, norm_E, bias_E) if x is not None]
        before = [x.clone() for x in read]
        residual_TE = random(rows, 2 * outputs, device=device, dtype=dtype, seed=4) / 4
        expected_TE = REFERENCE.linear_add(
            x_TF, weight_EF, residual_TE[:, :outputs].clone(), bias_E
        )
        calls = [residual_TE.clone()[:, :outputs] for _ in range(2)]
        results = [
            kernels.linear_add_norm(x_TF, weight_EF, call_TE, norm_E, EPS, bias_E)
            for call_TE in calls
        ]
        assert all(torch.equal(x, y) for x, y in zip(read, before, strict=True)), (
            "it changed inputs"
        )
        for call_TE, result in zip(calls, results, strict=True):
            if result is None:
                assert torch.equal(call_TE, residual_TE[:, :outputs]), "it declined, and added"
                continue
            sum_TE, normed_TE = result
            assert sum_TE.data_ptr() == call_TE.data_ptr(), "the sum has other memory"
            assert _memory(normed_TE) not in {_memory(x) for x in (call_TE, *read)}
            assert_equal(sum_TE, expected_TE)
            assert_equal(normed_TE, REFERENCE.rms_norm(sum_TE, norm_E, EPS))
        (first, second) = results
        if first is None or second is None:
            assert first is second, "it declined one of two equal calls"
            pytest.skip(f"linear_add_norm of {kernels.name} is not for {shape}")
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        result = kernels.linear_add_norm(
            x_TF, weight_EF, residual_TE[:, :outputs], wide_E, EPS, bias_E
        )
        if result is not None:  # a weight in float32 rounds once: so the rounded sum is normed
            normed_TE = REFERENCE.rms_norm(result[0], wide_E, EPS)
            assert_close_report(
                result[1], normed_TE, rel_norm=max(torch.finfo(dtype).eps / 8, 3e-6)
            )


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
