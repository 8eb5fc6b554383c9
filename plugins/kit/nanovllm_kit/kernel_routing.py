"""The part of the kernel sets' suite about `norm_route`, which a set may have.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, Routing, RoutingKernels
from nanovllm_kit.kernel_calls import REFERENCE, assert_equal, random
from nanovllm_kit.kernel_experts import NUM_EXPERTS, ROUTERS
from nanovllm_kit.numerics import assert_close_report

HIDDEN, EPS = 100, 1e-2
UNROUNDED = 2e-5
"""How far sums in float32 may be from exact ones."""


class RoutingChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures. Skipped by sets without it."""

    @pytest.mark.parametrize("rule", ROUTERS)
    @pytest.mark.parametrize("rows", [1, 2, 7, 300])
    def test_norm_and_choice_at_once_equal_the_operations_one_by_one(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int, rule: str
    ) -> None:
        """With a bias and without. Each logit is one number of the normed row, as no sum rounds it;
        a second call has the same bits, and the inputs are left as they were."""
        routing, bias_N = ROUTERS[rule], random(NUM_EXPERTS, device=device, seed=1) / 4
        x_TE, norm_E = inputs(rows, device, dtype)
        weight_NE = torch.eye(NUM_EXPERTS, HIDDEN, device=device, dtype=dtype)
        given = (x_TE, norm_E, weight_NE, bias_N)
        before = [x.clone() for x in given]
        for bias in (None, bias_N):
            weights_TC, ids_TC, normed_TE = norm_route(
                kernels, x_TE, norm_E, weight_NE, routing, bias
            )
            assert_equal(normed_TE, REFERENCE.rms_norm(x_TE, norm_E, EPS))
            expected = REFERENCE.route(normed_TE[:, :NUM_EXPERTS], routing, bias)
            assert (weights_TC.dtype, ids_TC.dtype) == (torch.float32, torch.int32)
            assert torch.equal(ids_TC, expected[1])
            torch.testing.assert_close(weights_TC, expected[0], rtol=2e-5, atol=1e-7)
            again = norm_route(kernels, x_TE, norm_E, weight_NE, routing, bias)
            for one, same in zip((weights_TC, ids_TC, normed_TE), again, strict=True):
                assert torch.equal(one, same), "a second call has other bits"
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))

    @pytest.mark.parametrize("exact", [False, True])
    def test_logits_of_normed_rows_are_rounded_as_the_rule_says(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, exact: bool
    ) -> None:
        """Seen through weights, which are the sigmoids of all logits."""
        routing = Routing(top_k=NUM_EXPERTS, scoring="sigmoid", exact_logits=exact)
        x_TE, norm_E = inputs(5, device, dtype)
        weight_NE = random(NUM_EXPERTS, HIDDEN, device=device, dtype=dtype, seed=4) * 0.05
        weights_TC, ids_TC, normed_TE = norm_route(kernels, x_TE, norm_E, weight_NE, routing)
        weights_TN = torch.empty_like(weights_TC).scatter_(1, ids_TC.long(), weights_TC)
        actual_TN = weights_TN.double().logit()
        expected_TN = normed_TE.double() @ weight_NE.double().t()
        if exact:
            assert_close_report(actual_TN, expected_TN, rel_norm=UNROUNDED)
        else:
            error = max(torch.finfo(dtype).eps, UNROUNDED)
            assert_close_report(actual_TN, expected_TN, rel_norm=error)
            assert_close_report(actual_TN, actual_TN.to(dtype), rel_norm=UNROUNDED)

    # Triton's interpreter is numpy, which warns of the NaN that is wanted here.
    @pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
    @pytest.mark.parametrize("rule", ROUTERS)
    def test_a_row_of_padding_changes_no_other_row(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rule: str
    ) -> None:
        """It may be NaN. Its experts exist, and differ from one another."""
        routing = ROUTERS[rule]
        x_TE, norm_E = inputs(4, device, dtype)
        weight_NE = random(NUM_EXPERTS, HIDDEN, device=device, dtype=dtype, seed=4) * 0.05
        expected = norm_route(kernels, x_TE, norm_E, weight_NE, routing)
        padded_TE = x_TE.clone()
        padded_TE[2] = torch.nan
        actual = norm_route(kernels, padded_TE, norm_E, weight_NE, routing)
        ids = actual[1][2].tolist()
        shared = [*range(NUM_EXPERTS, NUM_EXPERTS + routing.num_shared)]
        assert ids[routing.top_k :] == shared
        assert len(set(ids)) == routing.num_chosen
        assert set(ids) <= {*range(NUM_EXPERTS), *shared}
        for one, same in zip(actual, expected, strict=True):
            assert torch.equal(one[[0, 1, 3]], same[[0, 1, 3]])


def norm_route(
    kernels: KernelSet, x_TE: Tensor, norm_E: Tensor, weight_NE: Tensor, routing: Routing,
    bias_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the set returns; the test is skipped where it has no such operation for these."""
    if not isinstance(kernels, RoutingKernels):
        pytest.skip(f"{kernels.name} has no norm_route")
    result = kernels.norm_route(x_TE, norm_E, EPS, weight_NE, routing, bias_N)
    if result is None:
        pytest.skip(f"norm_route of {kernels.name} is not for {len(x_TE)} rows in {x_TE.dtype}")
    return result


def inputs(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows with gaps between them, and a norm's weight."""
    x_TE = random(rows, 2 * HIDDEN, device=device, dtype=dtype, seed=2)[:, :HIDDEN]
    return x_TE, 1 + random(HIDDEN, device=device, dtype=dtype, seed=3) / 8
