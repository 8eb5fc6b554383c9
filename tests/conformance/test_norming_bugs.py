"""Bugs planted in a set that norms the sums of products: the suite of kernel sets catches each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import NormingKernels
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.kernel_norming import SHAPES, NormingChecks

Result = tuple[Tensor, Tensor] | None
Operation = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Result]
TORCH = TorchKernels()


class AtOnce(TorchKernels, NormingKernels):
    """A set with this `linear_add_norm`."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def linear_add_norm(
        self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor, norm_weight_E: Tensor,
        eps: float, bias_E: Tensor | None = None,
    ) -> Result:  # fmt: skip
        return self.operation(x_TF, weight_EF, residual_TE, norm_weight_E, eps, bias_E)


def run(operation: Operation, dtype: torch.dtype = torch.float32) -> None:
    """The check, for all its shapes, with a bias and without."""
    check = NormingChecks().test_a_product_and_a_norm_at_once_equal_the_two_one_by_one
    for shape in SHAPES:
        for biased in (False, True):
            check(AtOnce(operation), torch.device("cpu"), dtype, shape, biased)


def one_by_one(x, weight, residual, norm, eps, bias) -> Result:
    total = TORCH.linear_add(x, weight, residual, bias)
    return total, TORCH.rms_norm(total, norm, eps)


def norms_the_product_alone(x, weight, residual, norm, eps, bias) -> Result:
    normed = TORCH.rms_norm(TORCH.linear(x, weight, bias), norm, eps)
    return TORCH.linear_add(x, weight, residual, bias), normed


def norms_the_residual_before_the_sum(x, weight, residual, norm, eps, bias) -> Result:
    normed = TORCH.rms_norm(residual, norm, eps)
    return TORCH.linear_add(x, weight, residual, bias), normed


def leaves_the_residual_as_it_was(x, weight, residual, norm, eps, bias) -> Result:
    return one_by_one(x, weight, residual.clone(), norm, eps, bias)


def norms_in_place(x, weight, residual, norm, eps, bias) -> Result:
    total, normed = one_by_one(x, weight, residual, norm, eps, bias)
    return total, total.copy_(normed)


def leaves_the_bias_out(x, weight, residual, norm, eps, bias) -> Result:
    return one_by_one(x, weight, residual, norm, eps, None)


def leaves_epsilon_out(x, weight, residual, norm, eps, bias) -> Result:
    return one_by_one(x, weight, residual, norm, 0.0, bias)


def leaves_the_last_inputs_out(x, weight, residual, norm, eps, bias) -> Result:
    cut = x.shape[1] - x.shape[1] % 64 or x.shape[1]
    return one_by_one(x[:, :cut], weight[:, :cut], residual, norm, eps, bias)


def declines_behind_the_sum(x, weight, residual, norm, eps, bias) -> Result:
    one_by_one(x, weight, residual, norm, eps, bias)
    return None


def scales_its_input(x, weight, residual, norm, eps, bias) -> Result:
    result = one_by_one(x, weight, residual, norm, eps, bias)
    x.mul_(2)
    return result


def takes_rows_of_x_to_lie_side_by_side(x, weight, residual, norm, eps, bias) -> Result:
    beside = x.as_strided(x.shape, (x.shape[1], 1))
    return one_by_one(beside, weight, residual, norm, eps, bias)


def rounds_before_a_float32_weight(x, weight, residual, norm, eps, bias) -> Result:
    total, normed = one_by_one(x, weight, residual, torch.ones_like(residual[0]), eps, bias)
    return total, (normed * norm).to(x.dtype)


def norms_the_sum_before_it_is_rounded(x, weight, residual, norm, eps, bias) -> Result:
    exact = residual.float() + TORCH.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    normed = TORCH.rms_norm(exact, norm.float(), eps)
    return TORCH.linear_add(x, weight, residual, bias), normed.to(x.dtype)


def differs_each_time() -> Operation:
    calls = count()

    def operation(x, weight, residual, norm, eps, bias) -> Result:
        total, normed = one_by_one(x, weight, residual, norm, eps, bias)
        return total, normed * (1 + 1e-6 * (next(calls) % 2))

    return operation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_passes(dtype: torch.dtype) -> None:
    """So what fails is the bug."""
    run(one_by_one, dtype)


@pytest.mark.parametrize(
    "operation",
    [
        norms_the_product_alone,
        norms_the_residual_before_the_sum,
        leaves_the_residual_as_it_was,
        norms_in_place,
        leaves_the_bias_out,
        leaves_epsilon_out,
        leaves_the_last_inputs_out,
        declines_behind_the_sum,
        scales_its_input,
        takes_rows_of_x_to_lie_side_by_side,
        differs_each_time(),
    ],
)
def test_a_planted_bug_is_caught(operation: Operation) -> None:
    """By the one check that is about it."""
    with pytest.raises(AssertionError):
        run(operation)


@pytest.mark.parametrize(
    "operation", [rounds_before_a_float32_weight, norms_the_sum_before_it_is_rounded]
)
def test_a_rounding_too_many_or_too_few_is_caught(operation: Operation) -> None:
    """Only half precision shows it."""
    with pytest.raises(AssertionError, match="relative norm error"):
        run(operation, torch.float16)
