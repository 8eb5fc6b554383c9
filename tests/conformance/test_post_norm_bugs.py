"""Bugs planted in a set's operations for models such as Gemma: the suite of sets catches each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.api import GeluKernels, PostNormKernels
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.kernel_post_norm import GELU_SHAPES, POST_NORM_SHAPES, PostNormChecks

TORCH = TorchKernels()
Gated = Callable[[Tensor, Tensor, Tensor | None], Tensor]
PostNorm = Callable[[Tensor, Tensor, float, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def one_by_one(x, weight, bias) -> Tensor:
    gate, up = TORCH.linear(x, weight, bias).float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x.dtype)


def three_operations(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    residual.add_(TORCH.rms_norm(x, weight, eps))
    return residual, TORCH.rms_norm(residual, next_weight, next_eps)


class AtOnce(TorchKernels, GeluKernels, PostNormKernels):
    """A set with these two operations."""

    def __init__(self, gated: Gated = one_by_one, post_norm: PostNorm = three_operations) -> None:
        self.gated, self.post_norm = gated, post_norm

    def gelu_gate_up(
        self, x_TE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None = None
    ) -> Tensor:
        return self.gated(x_TE, weight_2FE, bias_2F)

    def norm_add_norm(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, residual_TE: Tensor,
        next_weight_E: Tensor, next_eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.post_norm(x_TE, norm_weight_E, eps, residual_TE, next_weight_E, next_eps)


def check(kernels: AtOnce, dtype: torch.dtype = torch.float32) -> None:
    """All checks, for all their shapes."""
    cpu, checks = torch.device("cpu"), PostNormChecks()
    for shape in GELU_SHAPES:
        for biased in (False, True):
            checks.test_a_product_gated_by_gelu_equals_the_operations_one_by_one(
                kernels, cpu, dtype, shape, biased
            )
    checks.test_a_gate_of_gelu_stays_finite(kernels, cpu)
    for size in POST_NORM_SHAPES:
        checks.test_a_norm_a_sum_and_a_norm_at_once_equal_the_three_one_by_one(
            kernels, cpu, dtype, size
        )


def takes_silu(x, weight, bias) -> Tensor:
    return TORCH.silu_and_mul(TORCH.linear(x, weight, bias))


def takes_the_exact_gelu(x, weight, bias) -> Tensor:
    gate, up = TORCH.linear(x, weight, bias).chunk(2, dim=-1)
    return gelu(gate) * up


def takes_the_second_half_as_the_gate(x, weight, bias) -> Tensor:
    up, gate = TORCH.linear(x, weight, bias).chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


def leaves_the_bias_out(x, weight, bias) -> Tensor:
    return one_by_one(x, weight, None)


def overflows(x, weight, bias) -> Tensor:
    gate, up = TORCH.linear(x, weight, bias).chunk(2, dim=-1)
    power = torch.exp(1.5957691216 * (gate + 0.044715 * gate**3))
    return gate * power / (1 + power) * up


def norms_no_product(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    return residual, TORCH.rms_norm(residual, next_weight, next_eps)


def norms_the_addend(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    addend = TORCH.rms_norm(x, weight, eps)
    return residual.add_(addend), TORCH.rms_norm(addend, next_weight, next_eps)


def swaps_the_weights(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    return three_operations(x, next_weight, eps, residual, weight, next_eps)


def has_one_epsilon(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    return three_operations(x, weight, eps, residual, next_weight, eps)


def leaves_the_residual(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    return three_operations(x, weight, eps, residual.clone(), next_weight, next_eps)


def norms_in_place(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    total, normed = three_operations(x, weight, eps, residual, next_weight, next_eps)
    return total, total.copy_(normed)


def writes_to_x(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
    x.copy_(TORCH.rms_norm(x, weight, eps))
    return residual.add_(x), TORCH.rms_norm(residual, next_weight, next_eps)


def differs_each_time() -> PostNorm:
    calls = count()

    def operation(x, weight, eps, residual, next_weight, next_eps) -> tuple[Tensor, Tensor]:
        total, normed = three_operations(x, weight, eps, residual, next_weight, next_eps)
        return total, normed * (1 + 1e-6 * (next(calls) % 2))

    return operation


def does_not_round_the_sum(
    x, weight, eps, residual, next_weight, next_eps
) -> tuple[Tensor, Tensor]:
    exact = residual.float() + TORCH.rms_norm(x, weight, eps).float()
    normed = TORCH.rms_norm(exact, next_weight.float(), next_eps)
    return residual.copy_(exact), normed.to(x.dtype)


def does_not_round_the_addend(
    x, weight, eps, residual, next_weight, next_eps
) -> tuple[Tensor, Tensor]:
    residual.copy_(residual.float() + TORCH.rms_norm(x.float(), weight.float(), eps))
    return residual, TORCH.rms_norm(residual, next_weight, next_eps)


def rounds_before_a_float32_weight(
    x, weight, eps, residual, next_weight, next_eps
) -> tuple[Tensor, Tensor]:
    residual.add_((TORCH.rms_norm(x, torch.ones_like(x[0]), eps) * weight).to(x.dtype))
    return residual, TORCH.rms_norm(residual, next_weight, next_eps)


GATED = [
    takes_silu,
    takes_the_exact_gelu,
    takes_the_second_half_as_the_gate,
    leaves_the_bias_out,
    overflows,
]
POST_NORM = [
    norms_no_product,
    norms_the_addend,
    swaps_the_weights,
    has_one_epsilon,
    leaves_the_residual,
    norms_in_place,
    writes_to_x,
    differs_each_time(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_passes(dtype: torch.dtype) -> None:
    """So what fails is the bug."""
    assert isinstance(AtOnce(), GeluKernels)
    assert isinstance(AtOnce(), PostNormKernels)
    check(AtOnce(), dtype)


@pytest.mark.parametrize("operation", GATED)
def test_a_bug_of_the_gated_product_is_caught(operation: Gated) -> None:
    """By a check that is about it."""
    with pytest.raises(AssertionError):
        check(AtOnce(gated=operation))


@pytest.mark.parametrize("operation", POST_NORM)
def test_a_bug_of_the_norms_is_caught(operation: PostNorm) -> None:
    """By a check that is about it."""
    with pytest.raises(AssertionError):
        check(AtOnce(post_norm=operation))


@pytest.mark.parametrize(
    "operation",
    [does_not_round_the_sum, does_not_round_the_addend, rounds_before_a_float32_weight],
)
def test_a_rounding_too_many_or_too_few_of_the_norms_is_caught(operation: PostNorm) -> None:
    """Only half precision shows it."""
    with pytest.raises(AssertionError, match="relative norm error"):
        check(AtOnce(post_norm=operation), torch.float16)
