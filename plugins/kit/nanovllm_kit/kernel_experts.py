"""The part of the kernel sets' suite about mixtures of experts, against loops over single tokens.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, Routing
from nanovllm_kit.numerics import assert_close_report

REL_NORM = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Of sums over experts, whose halves are rounded in between."""
ROUTERS = {
    "softmax": Routing(top_k=3),
    "softmax, weights that add up to 1": Routing(top_k=4, renormalize=True),
    "one expert": Routing(top_k=1, scale=2.5),
    "groups by their best, two shared": Routing(
        top_k=4, num_groups=6, top_groups=2, scale=16.0, num_shared=2
    ),
    "sigmoid in groups by their two best, one shared": Routing(
        top_k=5,
        scoring="sigmoid",
        renormalize=True,
        num_groups=3,
        top_groups=2,
        group_score="top2",
        scale=2.5,
        num_shared=1,
    ),
}
NUM_EXPERTS = 24
Shape = tuple[int, int, int, int, int]
"""(tokens, hidden, intermediate, experts, experts for each token)."""
EXPERT_SHAPES: list[Shape] = [
    (1, 32, 24, 5, 2),
    (7, 64, 40, 8, 3),
    (40, 24, 72, 24, 4),
    (130, 48, 136, 16, 6),
    (2, 6, 2, 3, 2),
]
Mixture = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, weights, ids, gate and up, down: the arguments of `experts`."""


class ExpertChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures."""

    @pytest.mark.parametrize("rule", ROUTERS)
    @pytest.mark.parametrize("rows", [1, 5, 300])
    def test_tokens_choose_the_experts_of_the_rule(
        self, kernels: KernelSet, device: torch.device, rows: int, rule: str
    ) -> None:
        """With a bias, which counts for the choice and not for the weight, and without. Shared
        experts come behind them, with weight 1 whatever the rule does to others."""
        logits_TN = normal(rows, NUM_EXPERTS, seed=rows)
        for bias_N in (None, normal(NUM_EXPERTS, seed=1) / 4):
            expected = [choose(row, ROUTERS[rule], bias_N) for row in logits_TN.double()]
            on_device = None if bias_N is None else bias_N.to(device)
            weights_TC, ids_TC = kernels.route(logits_TN.to(device), ROUTERS[rule], on_device)
            assert (weights_TC.dtype, ids_TC.dtype) == (torch.float32, torch.int32)
            assert ids_TC.tolist() == [ids for ids, _ in expected]
            expected_TC = torch.tensor([weights for _, weights in expected])
            torch.testing.assert_close(weights_TC.cpu(), expected_TC, rtol=2e-5, atol=1e-7)

    def test_of_equal_experts_the_first_are_chosen(
        self, kernels: KernelSet, device: torch.device
    ) -> None:
        """Where all logits are equal, and where two are that are not neighbours; a shared expert is
        never equal to another."""
        logits_TN = torch.zeros(2, NUM_EXPERTS, device=device)
        logits_TN[1, [20, 3]] = 2.0
        _, ids_TC = kernels.route(logits_TN, Routing(top_k=3, num_shared=1))
        assert ids_TC.tolist() == [[0, 1, 2, NUM_EXPERTS], [3, 20, 0, NUM_EXPERTS]]

    def test_scores_are_computed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Of logits in the model's dtype, large ones too: the weights are those of float32."""
        logits_TN = (normal(9, NUM_EXPERTS, seed=3) * 30).to(device, dtype)
        routing = Routing(top_k=6)
        weights_TC, _ = kernels.route(logits_TN, routing)
        exact_TN = logits_TN.double().softmax(dim=-1)
        exact_TC = exact_TN.sort(dim=-1, descending=True).values[:, : routing.top_k]
        torch.testing.assert_close(weights_TC.double(), exact_TC, rtol=1e-5, atol=1e-12)

    def test_weights_are_zero_where_all_scores_underflow(
        self, kernels: KernelSet, device: torch.device
    ) -> None:
        """0 divided by their sum is no NaN, and other tokens and shared experts keep theirs."""
        logits_TN = normal(3, NUM_EXPERTS, seed=5).to(device)
        routing = Routing(top_k=4, scoring="sigmoid", renormalize=True, scale=2.5, num_shared=2)
        expected_TC, _ = kernels.route(logits_TN, routing)
        logits_TN[1] -= 200
        expected_TC[1, : routing.top_k] = 0
        weights_TC, _ = kernels.route(logits_TN, routing)
        assert torch.equal(weights_TC, expected_TC)

    # Triton's interpreter is numpy, which warns of the NaN that is wanted here.
    @pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
    def test_a_row_of_padding_names_experts_that_are_there(
        self, kernels: KernelSet, device: torch.device
    ) -> None:
        """Its logits may be NaN; ids beyond the weights would be read. Other rows keep theirs."""
        logits_TN = normal(4, NUM_EXPERTS, seed=4).to(device)
        for routing in ROUTERS.values():
            expected, _ = kernels.route(logits_TN, routing)
            padded_TN = logits_TN.clone()
            padded_TN[2] = torch.nan
            weights_TC, ids_TC = kernels.route(padded_TN, routing)
            ids, shared = ids_TC[2].tolist(), range(NUM_EXPERTS, NUM_EXPERTS + routing.num_shared)
            assert ids[routing.top_k :] == [*shared]
            assert len(set(ids)) == routing.num_chosen
            assert set(ids) <= {*range(NUM_EXPERTS), *shared}
            kept = [0, 1, 3]
            assert torch.equal(weights_TC[kept], expected[kept])

    @pytest.mark.parametrize("shape", EXPERT_SHAPES, ids=str)
    def test_every_token_gets_the_sum_of_its_experts(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """Some experts have most tokens, some have none; the inputs are left as they were."""
        inputs = mixture(shape, device, dtype)
        actual_TE = checked_sum(kernels, inputs)
        assert_close_report(actual_TE, naive_experts(*inputs), rel_norm=REL_NORM[dtype])
        assert torch.equal(kernels.experts(*inputs), actual_TE), "a second call has other bits"

    @pytest.mark.parametrize("shape", EXPERT_SHAPES[:3], ids=str)
    def test_experts_that_all_tokens_share_are_added_once(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """One or all of them, whose number the set knows beforehand."""
        inputs = mixture(shape, device, dtype)
        _, weights_TC, ids_TC, _, _ = inputs
        for num_shared in {1, shape[4]}:
            first = shape[3] - num_shared
            ids_TC[:, -num_shared:] = torch.arange(first, shape[3], device=device)
            weights_TC[:, -num_shared:] = 1.0
            others = shape[4] - num_shared
            ids_TC[:, :others] = ids_TC[:, :others].clamp(max=first - 1)
            actual_TE = kernels.experts(*inputs, num_shared=num_shared)
            assert_close_report(actual_TE, naive_experts(*inputs), rel_norm=REL_NORM[dtype])

    @pytest.mark.parametrize("shape", EXPERT_SHAPES[:3], ids=str)
    def test_the_residual_is_in_the_sum_of_experts(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """Once, in the place of the residual or in another; the inputs are left as they were."""
        inputs = mixture(shape, device, dtype)
        residual_TE = (8 * normal(*inputs[0].shape, seed=5)).to(device, dtype)
        expected_TE = naive_experts(*inputs) + residual_TE.double()
        actual_TE = checked_sum(kernels, inputs, residual_TE)
        assert_close_report(actual_TE, expected_TE, rel_norm=REL_NORM[dtype])

    def test_no_token_gets_another_ones_experts(
        self, kernels: KernelSet, device: torch.device
    ) -> None:
        """A token that is NaN or has such weights, as padding may, leaves all others finite; so
        does an expert that overflows and that none of them chose."""
        x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF = mixture(
            EXPERT_SHAPES[1], device, torch.float32
        )
        x_TE[3] = torch.nan
        weights_TC[5] = torch.nan
        down_NEF[-1] = torch.inf
        out_TE = kernels.experts(x_TE, weights_TC, ids_TC, gate_up_N2FE, down_NEF)
        is_nan_T = out_TE.isnan()
        assert torch.equal(is_nan_T.all(dim=-1), is_nan_T.any(dim=-1))
        assert is_nan_T.all(dim=-1).nonzero().flatten().tolist() == [3, 5]

    def test_an_expert_of_weight_zero_adds_nothing(
        self, kernels: KernelSet, device: torch.device
    ) -> None:
        """Scores underflow to 0, and such an expert is still chosen."""
        inputs = mixture(EXPERT_SHAPES[1], device, torch.float32)
        inputs[1][:, 0] = 0
        assert_close_report(kernels.experts(*inputs), naive_experts(*inputs), rel_norm=3e-6)


def checked_sum(kernels: KernelSet, inputs: Mixture, residual_TE: Tensor | None = None) -> Tensor:
    """The result of the set, which has the inputs' dtype and leaves them as they were."""
    before = [x.clone() for x in inputs]
    sum_TE = kernels.experts(*inputs, residual_TE=residual_TE)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert sum_TE.dtype == inputs[0].dtype
    return sum_TE


def normal(*shape: int, seed: int) -> Tensor:
    """Normal numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixture(shape: Shape, device: torch.device, dtype: torch.dtype) -> Mixture:
    """The arguments of `experts`. Every token chooses expert 1; the last is chosen by none."""
    num_tokens, hidden, intermediate, num_experts, top_k = shape
    draw = Random(str(shape))
    others = [expert for expert in range(num_experts - 1) if expert != 1]
    chosen = [draw.sample([1, *draw.sample(others, top_k - 1)], top_k) for _ in range(num_tokens)]
    tensors = (
        normal(num_tokens, hidden, seed=1).to(dtype),
        normal(num_tokens, top_k, seed=2).abs() + 0.1,
        torch.tensor(chosen, dtype=torch.int32),
        (normal(num_experts, 2 * intermediate, hidden, seed=3) / hidden**0.5).to(dtype),
        (normal(num_experts, hidden, intermediate, seed=4) / intermediate**0.5).to(dtype),
    )
    return tuple(x.to(device) for x in tensors)  # type: ignore[return-value]  # five of them


def naive_experts(
    x_TE: Tensor, weights_TC: Tensor, ids_TC: Tensor, gate_up_N2FE: Tensor, down_NEF: Tensor
) -> Tensor:
    """One token and one of its experts at a time, in float64 with the roundings of the contract."""
    dtype, out_TE = x_TE.dtype, torch.zeros_like(x_TE, dtype=torch.float64)
    for token, (weights, ids) in enumerate(zip(weights_TC.double(), ids_TC.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            gate_up = (gate_up_N2FE[expert].double() @ x_TE[token].double()).to(dtype).double()
            gate, up = gate_up.chunk(2)
            hidden = (gate / (1 + torch.exp(-gate)) * up).to(dtype).double()
            out_TE[token] += weight * (down_NEF[expert].double() @ hidden)
    return out_TE.to(dtype)


def choose(
    logits_N: Tensor, routing: Routing, bias_N: Tensor | None
) -> tuple[list[int], list[float]]:
    """The ids and weights of one token's experts, by sorting Python's numbers."""
    softmax = routing.scoring == "softmax"
    scores = (logits_N.softmax(dim=0) if softmax else logits_N.sigmoid()).tolist()
    bias = [0.0] * len(scores) if bias_N is None else bias_N.tolist()
    choice = [score + more for score, more in zip(scores, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    best = 1 if routing.group_score == "max" else 2

    def merit(group: range) -> float:
        scores: list[float] = sorted((choice[expert] for expert in group), reverse=True)
        return sum(scores[:best])

    top = sorted(groups, key=merit, reverse=True)[: routing.top_groups]
    open_to_all = sorted(expert for group in top for expert in group)
    ids = sorted(open_to_all, key=choice.__getitem__, reverse=True)[: routing.top_k]
    total = sum(scores[expert] for expert in ids) if routing.renormalize else 1.0
    weights = [scores[expert] / total * routing.scale for expert in ids]
    shared = range(len(scores), len(scores) + routing.num_shared)
    return [*ids, *shared], [*weights, *(1.0 for _ in shared)]
