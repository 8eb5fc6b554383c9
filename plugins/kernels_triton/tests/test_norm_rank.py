"""One token's mixture of many experts, whose ranks are counted: for which, and at models' sizes.

The rules of routers are tested by the suite of kernel sets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_kernels_triton import experts
from nanovllm_kernels_triton.experts_choice import FewPlan
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.norm_rank import FEWEST_EXPERTS, choose_norm_rank, run_norm_rank
from nanovllm_kernels_triton.norm_route import MOST_EXPERTS, choose_norm_route, empty_logits
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
REL_NORM = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Logits are rounded to the dtype: in its last bit, weights differ by so much."""
EPS = 1e-6
PROCESSORS = 132
RENORMALIZED = Routing(top_k=8, renormalize=True)
MODELS: dict[str, tuple[int, int, int, Routing]] = {  # experts, hidden, intermediate size, rule
    "30B-A3B": (128, 2048, 24, RENORMALIZED),
    "sigmoid": (
        160, 776, 40,
        Routing(top_k=6, scoring="sigmoid", renormalize=True, scale=2.5, exact_logits=True),
    ),
    "softmax, shared": (130, 512, 40, Routing(top_k=4, scale=8.0, num_shared=2)),
    "several experts of a program": (300, 600, 24, Routing(top_k=9, renormalize=True)),
}  # fmt: skip
CASES = [(name, dtype) for name in MODELS for dtype in DTYPES]
# A mixture that is interpreted takes seconds, so each case is one of the two tests'.
FIRST, SECOND = (CASES, CASES) if CUDA else (CASES[::4] + CASES[3::4], CASES[1::4] + CASES[2::4])
Stacks = tuple[Tensor, Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def make_stacks(name: str, dtype: torch.dtype) -> Stacks:
    num_experts, hidden, intermediate, routing = MODELS[name]
    num_experts += routing.num_shared
    gate_up = random(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=5) / hidden**0.5
    return gate_up, random(num_experts, hidden, intermediate, dtype=dtype, seed=6) / 8


def make_bias(name: str) -> Tensor | None:
    num_experts, *_, routing = MODELS[name]
    return random(num_experts, seed=2) / 4 if routing.scoring == "sigmoid" else None


def one_by_one(
    x: Tensor, norm: Tensor, weight: Tensor, routing: Routing, bias: Tensor | None, stacks: Stacks
) -> Tensor:
    """The mixture of the reference, on x."""
    reference = TorchKernels()
    normed = reference.rms_norm(x, norm, EPS)
    out = torch.empty(1, len(weight), device=DEVICE) if routing.exact_logits else None
    weights, ids = reference.route(reference.linear(normed, weight, None, out), routing, bias)
    return reference.experts(normed, weights, ids, *stacks, routing.num_shared, x.clone())


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), FIRST, ids=str)
@pytest.mark.slow
def test_mixtures_of_models_are_those_of_operations_apart(name: str, dtype: torch.dtype) -> None:
    """Logits lie apart, as two orders of a sum may differ in the last bit."""
    num_experts, hidden, _, routing = MODELS[name]
    x, norm = random(1, hidden, dtype=dtype), 1 + random(hidden, dtype=dtype, seed=1) / 8
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    steps = (order - num_experts / 2) * 12 / num_experts  # in their place the logits
    normed = TorchKernels().rms_norm(x, norm, EPS).float()
    weight = (steps[:, None] * normed / normed.square().sum()).to(dtype)
    weight += random(num_experts, hidden, dtype=dtype, seed=4) / (16 * hidden)
    router, stacks = (weight, routing, make_bias(name)), make_stacks(name, dtype)
    expected = one_by_one(x, norm, *router, stacks)
    kernels = TritonKernels()
    actual = kernels.norm_experts(x, norm, EPS, *router, *stacks, x)
    assert actual is not None
    assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])


def make_ladder(num_experts: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A norm's weight, and a router each of whose logits is a number of the normed row.

    No sum rounds it, and the norm's weight, of powers of two, rounds nothing.
    """
    norm = torch.exp2(random(hidden, dtype=dtype, seed=1).round().clamp(-1, 1))
    weight = torch.zeros(num_experts, hidden, dtype=dtype, device=DEVICE)
    columns = torch.randperm(hidden, generator=torch.Generator().manual_seed(2))[:num_experts]
    weight[torch.arange(num_experts), columns] = 4.0
    return norm, weight


def make_row(norm: Tensor, weight: Tensor, seed: int) -> Tensor:
    """Its logits are equal in pairs, and otherwise lie apart, in some order."""
    num_experts, columns = len(weight), weight.argmax(dim=1)
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    x = random(1, len(norm), dtype=norm.dtype, seed=seed)
    x[0, columns] = ((order // 2 - num_experts // 4 + 0.5) * 4 / num_experts).to(norm.dtype)
    return x / norm


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), SECOND, ids=str)
@pytest.mark.slow
def test_rows_one_after_another_leave_no_logits(name: str, dtype: torch.dtype) -> None:
    """Nothing of one is left for the next."""
    num_experts, hidden, _, routing = MODELS[name]
    norm, weight = make_ladder(num_experts, hidden, dtype)
    bias = make_bias(name)
    router = (weight, routing, None if bias is None else bias.round())
    stacks, kernels = make_stacks(name, dtype), TritonKernels()
    for seed in range(50 if CUDA else 2):
        x = make_row(norm, weight, seed)
        expected = one_by_one(x, norm, *router, stacks)
        actual = kernels.norm_experts(x, norm, EPS, *router, *stacks, x)
        assert actual is not None
        assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])
        assert kernels._logits is not None
        assert torch.equal(kernels._logits, empty_logits(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_in_the_order_of_their_ranks(name: str, dtype: torch.dtype) -> None:
    """Of equal ones the first comes first; shared ones come last, with weight 1."""
    num_experts, hidden, _, routing = MODELS[name]
    norm, weight = make_ladder(num_experts, hidden, dtype)
    x, rule = make_row(norm, weight, 7), replace(routing, renormalize=False)
    plan = choose_norm_route(1, num_experts, hidden, dtype.itemsize)
    assert plan is not None
    passed = empty_logits(DEVICE)
    options = TritonKernels()._options
    weights, ids, normed = run_norm_rank(plan, x, norm, EPS, weight, rule, None, passed, options)
    logits = normed.float() @ weight.float().t()
    assert torch.equal(passed.view(-1)[:num_experts].view(torch.float32), logits[0])
    expected = TorchKernels().route(logits, rule)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=2e-5, atol=1e-7)
    assert_close_report(normed, TorchKernels().rms_norm(x, norm, EPS), rel_norm=2e-3)


@pytest.mark.parametrize("num_experts", [128, 300])
def test_of_equal_experts_the_first_are_chosen(num_experts: int) -> None:
    """Where all logits are equal, and where two are that other programs have."""
    x, norm = torch.ones(1, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    weight = torch.zeros(num_experts, 64, device=DEVICE)
    plan = choose_norm_route(1, num_experts, 64, 4)
    assert plan is not None
    for best in ([], [100, 3]):
        weight[best] = 1.0
        rest = [one for one in range(8) if one not in best]
        _, ids, _ = run_norm_rank(
            plan, x, norm, EPS, weight, RENORMALIZED, None, empty_logits(DEVICE),
            TritonKernels()._options,
        )  # fmt: skip
        assert ids.tolist() == [[*sorted(best), *rest][:8]]


# Triton's interpreter is numpy, which warns of the NaN that is wanted here.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
def test_a_row_of_padding_has_experts_that_are_there() -> None:
    """Each another one: ids beyond the weights would be read."""
    plan = choose_norm_route(1, 300, 64, 4)
    assert plan is not None
    x, weight = torch.full((1, 64), torch.nan, device=DEVICE), random(300, 64)
    for routing in (RENORMALIZED, Routing(top_k=8, scoring="sigmoid", num_shared=1)):
        _, ids, _ = run_norm_rank(
            plan, x, x[0], EPS, weight, routing, None, empty_logits(DEVICE),
            TritonKernels()._options,
        )  # fmt: skip
        assert ids.tolist() == [[*range(8), *range(300, 300 + routing.num_shared)]]


def test_a_mixture_that_fails_between_its_kernels_leaves_no_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory may run out there. The next call's programs would take them for their own."""
    num_experts, hidden, _, routing = MODELS["30B-A3B"]
    kernels, stacks = TritonKernels(), make_stacks("30B-A3B", torch.float32)
    given = (random(hidden, seed=1), EPS, random(num_experts, hidden, seed=2) / 40, routing, None)

    def fail(*_: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(experts, "few_gate_up", fail)
        with pytest.raises(MemoryError):
            kernels.norm_experts(random(1, hidden), *given, *stacks)
    assert kernels._logits is not None
    assert torch.equal(kernels._logits, empty_logits(DEVICE))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_announced_weight_is_given_to_the_experts_of_its_stack(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the whole mixture at once, and where its operations are called one by one; no other stack
    has it."""
    kernels, gate_up, down = TritonKernels(), random(128, 16, 64), random(128, 64, 8)
    x, norm, weight, router = random(rows, 64), random(64), random(3, 64), random(128, 64)
    given: list[Tensor | None] = []
    launch = experts.few_gate_up

    def note(plan: FewPlan, *inputs: Any) -> Tensor:
        given.append(inputs[-1])
        return launch(plan, *inputs)

    monkeypatch.setattr(experts, "few_gate_up", note)
    kernels.announce_weight(gate_up, weight)
    for stack in (gate_up, gate_up.clone()):
        if kernels.norm_experts(x, norm, EPS, router, RENORMALIZED, None, stack, down) is None:
            kernels.experts(x, *kernels.route(x @ router.t(), RENORMALIZED), stack, down)
    assert given == [weight, None]


def test_ranks_are_counted_for_one_row_of_many_experts() -> None:
    """By the plan of `norm_route`; two rows, fewer experts and wider rows are left to it."""
    plan = choose_norm_rank(1, 2048, FEWEST_EXPERTS, 2, RENORMALIZED, PROCESSORS)
    assert plan is not None
    assert plan == choose_norm_route(1, FEWEST_EXPERTS, 2048, 2)
    for rows, hidden, num_experts, itemsize in (
        (0, 2048, 128, 2), (2, 2048, 128, 2), (1, 2048, 64, 2), (1, 2048, FEWEST_EXPERTS - 1, 2),
        (1, 7168, 256, 4), (1, 2048, MOST_EXPERTS + 1, 2),
    ):  # fmt: skip
        sizes = (rows, hidden, num_experts, itemsize)
        assert choose_norm_rank(*sizes, RENORMALIZED, PROCESSORS) is None


@pytest.mark.parametrize(
    ("routing", "is_counted"),
    [
        (Routing(top_k=6, num_shared=2, exact_logits=True), True),
        (Routing(top_k=8, scoring="sigmoid", renormalize=True, scale=2.5), True),
        (Routing(top_k=8, num_groups=8, top_groups=8), True),
        (Routing(top_k=8, num_groups=8, top_groups=4), False),
        (Routing(top_k=8, renormalize=True, num_shared=1), False),
    ],
    ids=str,
)
def test_some_rules_are_left_to_other_kernels(routing: Routing, is_counted: bool) -> None:
    """Groups that are left out, and a sum that shared experts have no part in. Nothing changes."""
    plan = choose_norm_rank(1, 2048, 128, 2, routing, PROCESSORS)
    assert (plan is not None) == is_counted
    if is_counted:
        return
    kernels, x = TritonKernels(), random(1, 64)
    before, num_experts = x.clone(), 128 + routing.num_shared
    stacks = (random(num_experts, 16, 64), random(num_experts, 64, 8))
    router = (random(128, 64), routing, None)
    assert kernels.norm_experts(x, random(64), EPS, *router, *stacks, x) is None
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("num_experts", "hidden", "fewest"), [(128, 2048, 16), (256, 7168, 64), (512, 2048, 16)]
)
def test_all_programs_are_resident_at_once(num_experts: int, hidden: int, fewest: int) -> None:
    """Eight warps on a multiprocessor, as each program waits for all others."""
    sizes = (1, hidden, num_experts, 2, RENORMALIZED)
    assert choose_norm_rank(*sizes, fewest) is not None
    assert choose_norm_rank(*sizes, fewest - 1) is None
