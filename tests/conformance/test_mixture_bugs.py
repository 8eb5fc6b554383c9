"""Bugs planted in sets that compute whole mixtures, or fetch weights: the suite catches each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import FetchingKernels, MixtureKernels, Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_kit.kernel_mixture import RULES, Mixture, MixtureChecks, one_by_one

EQUAL = "test_a_mixture_at_once_equals_the_operations_one_by_one"
PADDING = "test_a_mixture_of_padding_changes_no_other_row_and_no_later_call"
Operation = Callable[[Mixture, Tensor, Tensor | None], Tensor]


class AtOnce(TorchKernels, MixtureKernels):
    """A set with this `norm_experts`."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def norm_experts(
        self, x_TE: Tensor, norm_weight_E: Tensor, eps: float, weight_NE: Tensor, routing: Routing,
        bias_N: Tensor | None, gate_up_N2FE: Tensor, down_NEF: Tensor,
        residual_TE: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        router = (norm_weight_E, eps, weight_NE, routing, bias_N)
        return self.operation(Mixture(*router, gate_up_N2FE, down_NEF), x_TE, residual_TE)


def run(check: str, operation: Operation, dtype: torch.dtype = torch.float32) -> None:
    """One check of the suite, for all its rows and rules."""
    for rows in (1, 2, 5):
        for rule in RULES:
            getattr(MixtureChecks(), check)(
                AtOnce(operation), torch.device("cpu"), dtype, rows, rule
            )


def loses_the_residual(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    y = one_by_one(mixture, x)
    return y if residual is None else residual.copy_(y)


def leaves_the_residual_as_it_was(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    return one_by_one(mixture, x, None if residual is None else residual.clone())


def writes_to_x(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    y = one_by_one(mixture, x, residual)
    return y if residual is not None else x.copy_(y)


def leaves_the_norm_out(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    """Its weight alone: every row is normed."""
    return one_by_one(mixture._replace(norm=torch.ones_like(mixture.norm)), x, residual)


def leaves_the_bias_out(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    return one_by_one(mixture._replace(bias=None), x, residual)


def adds_the_bias_before_a_softmax_is_divided(
    mixture: Mixture, x: Tensor, residual: Tensor | None
) -> Tensor:
    """Of one row: that is to add a smaller bias behind."""
    if mixture.bias is not None and mixture.routing.scoring == "softmax" and len(x) == 1:
        logits = TorchKernels().rms_norm(x, mixture.norm, mixture.eps) @ mixture.router.t()
        total = (logits - logits.max()).exp().sum()
        mixture = mixture._replace(bias=mixture.bias / total)
    return one_by_one(mixture, x, residual)


def takes_the_last_of_equal_experts(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    if not mixture.routing.num_shared:
        parts = ("router", "gate_up", "down", *(["bias"] if mixture.bias is not None else []))
        mixture = mixture._replace(**{part: getattr(mixture, part).flip(0) for part in parts})
    return one_by_one(mixture, x, residual)


def differs_each_time() -> Operation:
    """By no more than another order of a sum does."""
    calls = count()

    def operation(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
        return one_by_one(mixture, x, residual).mul_(1 + 1e-6 * (next(calls) % 2))

    return operation


def keeps_a_row() -> Operation:
    """The first of the call before; a NaN stays."""
    kept = [torch.zeros(())]

    def operation(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
        before, kept[0] = kept[0], x[0].sum()
        return one_by_one(mixture, x, residual).add_(0 * before)

    return operation


def mixes_rows(mixture: Mixture, x: Tensor, residual: Tensor | None) -> Tensor:
    nothing = 0 * x.sum()
    return one_by_one(mixture, x, residual).add_(nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [EQUAL, PADDING])
def test_the_reference_passes(check: str, dtype: torch.dtype) -> None:
    """So what fails is the bug."""
    run(check, one_by_one, dtype)


@pytest.mark.parametrize(
    ("operation", "check"),
    [
        (loses_the_residual, EQUAL),
        (leaves_the_residual_as_it_was, EQUAL),
        (writes_to_x, EQUAL),
        (leaves_the_norm_out, EQUAL),
        (leaves_the_bias_out, EQUAL),
        (adds_the_bias_before_a_softmax_is_divided, EQUAL),
        (takes_the_last_of_equal_experts, EQUAL),
        (differs_each_time(), EQUAL),
        (keeps_a_row(), PADDING),
        (mixes_rows, PADDING),
    ],
)
def test_a_planted_bug_is_caught(operation: Operation, check: str) -> None:
    """By the check that is about it."""
    with pytest.raises(AssertionError):
        run(check, operation)


class Announced(TorchKernels, FetchingKernels):
    """A set that does this with an announced stack and weight."""

    def __init__(self, use: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.use = use

    def announce_weight(self, gate_up_N2FE: Tensor, weight_XE: Tensor) -> None:
        self.use(gate_up_N2FE, weight_XE)


def overwrites_the_beginning_of_the_weight(_: Tensor, weight: Tensor) -> None:
    weight[0] = 0.0


def stores_the_weight_in_the_stack(stack: Tensor, weight: Tensor) -> None:
    stack[:] = weight[: stack.shape[1]]


@pytest.mark.parametrize(
    ("use", "is_caught"),
    [
        (lambda stack, weight: None, False),
        (overwrites_the_beginning_of_the_weight, True),
        (stores_the_weight_in_the_stack, True),
    ],
)
def test_a_set_that_uses_an_announced_weight_is_caught(
    use: Callable[[Tensor, Tensor], object], is_caught: bool
) -> None:
    """And one that does not passes."""
    catches = pytest.raises(AssertionError) if is_caught else nullcontext()
    for rows in (1, 5):
        with catches:
            MixtureChecks().test_an_announced_weight_changes_no_result(
                Announced(use), torch.device("cpu"), torch.float32, rows
            )
