"""The part of the kernel sets' suite about `norm_experts` and `announce_weight`, optional both.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import FetchingKernels, KernelSet, MixtureKernels, Routing
from nanovllm_kit.kernel_calls import REFERENCE, random
from nanovllm_kit.kernel_experts import REL_NORM
from nanovllm_kit.numerics import assert_close_report

NUM_EXPERTS, HIDDEN, INTERMEDIATE, EPS = 128, 160, 24, 1e-2
RULES: dict[str, tuple[Routing, bool]] = {  # and whether the router has a bias
    "softmax": (Routing(top_k=3, scale=16.0), False),
    "softmax, weights that add up to 1": (Routing(top_k=7, renormalize=True), False),
    "softmax and bias, weights that add up to 1": (Routing(top_k=7, renormalize=True), True),
    "sigmoid and bias, weights that add up to 2.5": (
        Routing(top_k=5, scoring="sigmoid", renormalize=True, scale=2.5),
        True,
    ),
    "exact logits and bias, two shared": (
        Routing(top_k=6, exact_logits=True, num_shared=2),
        True,
    ),
    "sigmoid in groups, one shared": (
        Routing(
            top_k=5, scoring="sigmoid", renormalize=True, num_groups=8, top_groups=3, num_shared=1
        ),
        False,
    ),
}


class Mixture(NamedTuple):
    """A norm, a router and its experts, in the order of the arguments of `norm_experts`."""

    norm: Tensor
    eps: float
    router: Tensor
    routing: Routing
    bias: Tensor | None
    gate_up: Tensor
    down: Tensor


class MixtureChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures. Skipped by sets without it."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_a_mixture_at_once_equals_the_operations_one_by_one(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int, rule: str
    ) -> None:
        """Without a residual, on x itself or on another one, by turns of the rules, with gaps
        between the rows. A second call without one has the same bits, and all that is not the
        residual is left as it was."""
        mixture = make_mixture(rule, device, dtype)
        rows_TE = make_rows(rows, mixture)
        weights = [value for value in mixture if isinstance(value, Tensor)]
        before = [weight.clone() for weight in weights]
        residual = ("x", None, "another")[list(RULES).index(rule) % 3]
        x_TE, residual_TE = with_residual(rows_TE, residual)
        actual_TE = at_once(kernels, mixture, x_TE, residual_TE)
        expected_TE = one_by_one(mixture, *with_residual(rows_TE, residual))
        assert actual_TE.dtype == dtype
        assert_close_report(actual_TE, expected_TE, rel_norm=REL_NORM[dtype])
        if residual_TE is None:
            again_TE = at_once(kernels, mixture, x_TE)
            assert torch.equal(again_TE, actual_TE), "a second call has other bits"
        else:
            assert actual_TE.data_ptr() == residual_TE.data_ptr(), "it has another memory"
        assert residual_TE is x_TE or torch.equal(x_TE, rows_TE), "it changed x"
        assert all(torch.equal(x, y) for x, y in zip(weights, before, strict=True))

    # Triton's interpreter is numpy, which warns of the NaN that is wanted here.
    @pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_a_mixture_of_padding_changes_no_other_row_and_no_later_call(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int, rule: str
    ) -> None:
        """It may be NaN."""
        mixture = make_mixture(rule, device, dtype)
        x_TE = make_rows(rows, mixture)
        padded_TE = x_TE.clone()
        padded_TE[0] = torch.nan
        others_TE = at_once(kernels, mixture, padded_TE)[1:].clone()
        actual_TE = at_once(kernels, mixture, x_TE)
        assert torch.equal(others_TE, actual_TE[1:])
        assert_close_report(actual_TE, one_by_one(mixture, x_TE), rel_norm=REL_NORM[dtype])

    @pytest.mark.parametrize("rows", [1, 5])
    def test_an_announced_weight_changes_no_result(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Of the mixture that it follows, by all its operations, and of another one."""
        if not isinstance(kernels, FetchingKernels):
            pytest.skip(f"{kernels.name} has no announce_weight")
        mixture = make_mixture("softmax", device, dtype)
        weight_XE = random(HIDDEN + 8, HIDDEN, device=device, dtype=dtype, seed=7)
        x_TE, before_XE = make_rows(rows, mixture), weight_XE.clone()
        stacks = [mixture, mixture._replace(gate_up=mixture.gate_up.flip(0))]
        expected = [results_of(kernels, one, x_TE) for one in stacks]
        kernels.announce_weight(mixture.gate_up, weight_XE)
        for one, results in zip(stacks, expected, strict=True):
            again = results_of(kernels, one, x_TE)
            assert all(torch.equal(x, y) for x, y in zip(again, results, strict=True))
        assert torch.equal(weight_XE, before_XE), "it changed the weight"


def results_of(kernels: KernelSet, mixture: Mixture, x_TE: Tensor) -> list[Tensor]:
    """A mixture's experts on x, and where the set has it the whole mixture at once."""
    weights_TC, ids_TC = kernels.route(x_TE[:, :NUM_EXPERTS], mixture.routing)
    results = [kernels.experts(x_TE, weights_TC, ids_TC, mixture.gate_up, mixture.down)]
    if isinstance(kernels, MixtureKernels):
        whole_TE = kernels.norm_experts(x_TE, *mixture)
        results += [] if whole_TE is None else [whole_TE]
    return results


def at_once(
    kernels: KernelSet, mixture: Mixture, x_TE: Tensor, residual_TE: Tensor | None = None
) -> Tensor:
    """What the set returns; the test is skipped where it has no such operation for these."""
    if not isinstance(kernels, MixtureKernels):
        pytest.skip(f"{kernels.name} has no norm_experts")
    result = kernels.norm_experts(x_TE, *mixture, residual_TE)
    if result is None:
        pytest.skip(f"norm_experts of {kernels.name} is not for {len(x_TE)} rows by this rule")
    return result


def one_by_one(mixture: Mixture, x_TE: Tensor, residual_TE: Tensor | None = None) -> Tensor:
    """The same by the operations of the reference."""
    routing, exact_TN = mixture.routing, None
    normed_TE = REFERENCE.rms_norm(x_TE, mixture.norm, mixture.eps)
    if routing.exact_logits:
        exact_TN = torch.empty(len(x_TE), NUM_EXPERTS, device=x_TE.device)
    logits_TN = REFERENCE.linear(normed_TE, mixture.router, None, exact_TN)
    weights_TC, ids_TC = REFERENCE.route(logits_TN, routing, mixture.bias)
    stacks = (mixture.gate_up, mixture.down)
    return REFERENCE.experts(
        normed_TE, weights_TC, ids_TC, *stacks, routing.num_shared, residual_TE
    )


def make_mixture(rule: str, device: torch.device, dtype: torch.dtype) -> Mixture:
    """Each logit is one number of the normed row, as no sum rounds it.

    The norm's weights are powers of two, which round nothing. Most experts share their bias.
    """

    def some(*shape: int, seed: int) -> Tensor:
        return random(*shape, device=device, dtype=dtype, seed=seed)

    routing, has_bias = RULES[rule]
    num_experts = NUM_EXPERTS + routing.num_shared
    levels_N = random(NUM_EXPERTS, device=device, seed=1).round().clamp(-1, 1)
    return Mixture(
        norm=torch.exp2(some(HIDDEN, seed=2).round().clamp(-1, 1)),
        eps=EPS,
        router=torch.eye(NUM_EXPERTS, HIDDEN, device=device, dtype=dtype),
        routing=routing,
        bias=levels_N / 8 if has_bias else None,
        gate_up=some(num_experts, 2 * INTERMEDIATE, HIDDEN, seed=3) / HIDDEN**0.5,
        down=some(num_experts, HIDDEN, INTERMEDIATE, seed=4) / INTERMEDIATE**0.5,
    )


def make_rows(rows: int, mixture: Mixture) -> Tensor:
    """Normed, they begin with a ladder in some order: NUM_EXPERTS logits that are equal in pairs.

    The others lie so far apart that rounding cannot change their order.
    """
    norm_E = mixture.norm
    places_TN = random(rows, NUM_EXPERTS, device=norm_E.device, seed=5).argsort()
    values_TE = random(rows, HIDDEN, device=norm_E.device, dtype=norm_E.dtype, seed=6)
    values_TE[:, :NUM_EXPERTS] = (places_TN // 2 - (NUM_EXPERTS // 2 - 1) / 2) * 8 / NUM_EXPERTS
    return values_TE / norm_E


def with_residual(rows_TE: Tensor, residual: str | None) -> tuple[Tensor, Tensor | None]:
    """A copy of the rows, and a residual: None, x itself or another one. Rows have gaps between."""
    x_TE, other_TE = (torch.stack((x, x), dim=1)[:, 0] for x in (rows_TE, rows_TE.flip(1)))
    return x_TE, {None: None, "x": x_TE, "another": other_TE}[residual]
