"""Norm, router and choice in one kernel: for which rows, and at the sizes of models.

The rules of routers are tested by the suite of kernel sets.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.norm_route import (
    MOST_EXPERTS,
    MOST_ROWS,
    choose_norm_route,
    empty_logits,
)
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
EPS = 1e-6
MODELS: dict[str, tuple[int, int, Routing]] = {  # experts, hidden size, rule
    "30B-A3B": (128, 2048, Routing(top_k=8, renormalize=True)),
    "V2-Lite": (64, 2048, Routing(top_k=6, exact_logits=True, num_shared=2)),
    "V3": (
        256,
        7168,
        Routing(
            top_k=8, scoring="sigmoid", renormalize=True, num_groups=8, top_groups=4,
            group_score="top2", scale=2.5, exact_logits=True, num_shared=1,
        ),
    ),
    "odd": (60, 1544, Routing(top_k=4)),
}  # fmt: skip


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_routers_of_models_choose_as_three_kernels_do(name: str, dtype: torch.dtype) -> None:
    """Two rows. Their logits lie apart, as two orders of a sum may differ in the last bit."""
    num_experts, hidden, routing = MODELS[name]
    if choose_norm_route(2, num_experts, hidden, dtype.itemsize) is None:
        pytest.skip("a row in float32 is too wide for one kernel")
    kernels, reference = TritonKernels(), TorchKernels()
    x, norm = random(2, hidden, dtype=dtype), 1 + random(hidden, dtype=dtype, seed=1) / 8
    bias = random(num_experts, seed=2) / 4 if routing.scoring == "sigmoid" else None
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    steps = (order - num_experts / 2) * 12 / num_experts  # in their place the logits of row 0
    first = reference.rms_norm(x, norm, EPS)[0].float()
    weight = (steps[:, None] * first / first.square().sum()).to(dtype)
    weight += random(num_experts, hidden, dtype=dtype, seed=4) / hidden
    routed = kernels.norm_route(x, norm, EPS, weight, routing, bias)
    assert routed is not None
    weights, ids, normed = routed
    assert_close_report(normed, reference.rms_norm(x, norm, EPS), rel_norm=2e-3)
    out = torch.empty(2, num_experts, device=DEVICE) if routing.exact_logits else None
    expected = reference.route(reference.linear(normed, weight, None, out), routing, bias)
    assert torch.equal(ids[0], expected[1][0])
    torch.testing.assert_close(weights[0], expected[0][0], rtol=3e-2, atol=1e-6)
    assert kernels._logits is not None
    assert torch.equal(kernels._logits, empty_logits(DEVICE))


def test_few_rows_that_registers_hold_take_one_kernel() -> None:
    """Up to eight of them; V3's rows of half precision are the widest."""
    for rows in (1, MOST_ROWS):
        for num_experts, hidden, itemsize in ((128, 2048, 2), (64, 2048, 4), (256, 7168, 2)):
            assert choose_norm_route(rows, num_experts, hidden, itemsize) is not None
    assert choose_norm_route(MOST_ROWS + 1, 128, 2048, 2) is None
    assert choose_norm_route(1, 256, 7168, 4) is None
    assert choose_norm_route(1, MOST_EXPERTS, 1024, 2) is not None
    assert choose_norm_route(1, MOST_EXPERTS + 1, 1024, 2) is None


@pytest.mark.parametrize("num_experts", [8, 64, 128, 160, 256, 512])
def test_a_row_has_no_more_programs_than_multiprocessors(num_experts: int) -> None:
    """So that its programs run at once; and with fewer experts each has one."""
    plan = choose_norm_route(1, num_experts, 2048, 2)
    assert plan is not None
    assert -(-num_experts // plan.block_n) <= 132
    assert plan.block_n == 1 or num_experts > 132


def test_a_row_has_the_same_bits_beside_others() -> None:
    """Each has programs of its own, and logits that pass apart. None is left behind."""
    x, norm, weight = random(MOST_ROWS, 100), random(100, seed=1), random(20, 100, seed=2) / 10
    routing, kernels = Routing(top_k=3, num_shared=1), TritonKernels()
    together = kernels.norm_route(x, norm, EPS, weight, routing)
    alone = kernels.norm_route(x[5:6], norm, EPS, weight, routing)
    assert together is not None
    assert alone is not None
    assert all(torch.equal(a[5:6], b) for a, b in zip(together, alone, strict=True))
    assert kernels._logits is not None
    assert torch.equal(kernels._logits, empty_logits(DEVICE))
    assert kernels.norm_route(random(MOST_ROWS + 1, 100), norm, EPS, weight, routing) is None
