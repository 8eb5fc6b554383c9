"""Products of two to eight rows by the kernel in Gluon: the choice, and on a GPU the results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from nanovllm_core.api import GeluKernels
from nanovllm_core.kernels import TorchKernels
from nanovllm_kernels_triton import few_rows
from nanovllm_kernels_triton.few_rows import GLUON_VERSIONS, has_few_rows_kernel
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.linear import LinearLauncher
from nanovllm_kernels_triton.linear_choice import (
    FEW_ROWS,
    MAX_FEW_WEIGHTS,
    FewRowsPlan,
    choose_few_rows,
)
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.device("cuda")
HALVES = [torch.float16, torch.bfloat16]
REL_NORM = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
EPS = 1e-6
SHAPES = {
    "one step": (16, 64),
    "more programs than one": (4096, 1024),
    "outputs and inputs that fill no program and no step": (1000, 1544),
    "more steps than are held": (48, 8192),
}


@pytest.fixture
def with_kernel() -> None:
    """Skip where the device or the Triton has no such kernel."""
    if not torch.cuda.is_available() or not has_few_rows_kernel(CUDA):
        pytest.skip("needs a CUDA GPU, and a Triton whose Gluon is known")


def told_set() -> TritonKernels:
    """One that computes all products by it that it is for."""
    kernels = TritonKernels(few_rows=True)
    kernels.announce_prepared_decode(FEW_ROWS)
    return kernels


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(CUDA, dtype)


def gelu_gate_up(kernels: TorchKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By the set's own operation, or by those that it is made of."""
    if isinstance(kernels, GeluKernels):
        return kernels.gelu_gate_up(x, weight, bias)
    gate, up = kernels.linear(x, weight, bias).float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x.dtype)


def test_it_is_chosen_for_two_to_eight_rows_of_weights_that_are_not_large() -> None:
    """In half precision, where rows of the weight begin at whole 16 bytes."""
    half = torch.bfloat16
    for rows in range(2, FEW_ROWS + 1):
        assert choose_few_rows(rows, 4096, 1024, half) == FewRowsPlan(num_warps=4, held=4)
        assert choose_few_rows(rows, 1024, 3072, torch.float16) == FewRowsPlan(8, held=6)
    for rows in (0, 1, FEW_ROWS + 1, 64):
        assert choose_few_rows(rows, 4096, 1024, half) is None
    assert choose_few_rows(3, 4096, 1024, torch.float32) is None
    assert choose_few_rows(3, 4096, 1028, half) is None
    for gated, most in MAX_FEW_WEIGHTS.items():
        outputs = most // 4096
        assert choose_few_rows(3, outputs, 4096, half, gated=gated) is not None
        assert choose_few_rows(3, outputs + 1, 4096, half, gated=gated) is None


def test_a_set_without_it_leaves_such_rows_to_the_other_kernels() -> None:
    """As a CPU's, and one of a Triton whose Gluon is not known."""
    assert not has_few_rows_kernel(torch.device("cpu"))
    x, weight = torch.zeros(3, 64, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    assert not isinstance(TritonKernels()._choose(x, weight), FewRowsPlan)
    assert isinstance(told_set()._choose(x, weight), FewRowsPlan)


def test_it_is_for_steps_whose_attention_prepares_q_k_and_v() -> None:
    """Behind another kernel it would make them slower."""
    weight, kernels = torch.zeros(32, 64, dtype=torch.float16), TritonKernels(few_rows=True)
    for told in (None, 0, 3):
        if told is not None:
            kernels.announce_prepared_decode(told)
        plans = [kernels._choose(weight[:rows], weight) for rows in range(1, FEW_ROWS + 1)]
        chosen = [rows for rows, plan in enumerate(plans, 1) if isinstance(plan, FewRowsPlan)]
        assert chosen == [*range(2, (told or 0) + 1)]


def test_rows_that_are_to_be_normed_are_refused() -> None:
    """The kernel set norms them before."""
    x, weight = torch.zeros(3, 64, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="FewRowsPlan takes rows that are normed already"):
        LinearLauncher().run(FewRowsPlan(4, 1), x, weight, norm_weight_K=x[0])


def test_it_needs_dependent_launch_and_a_known_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon is an experimental language, and changes."""
    for dependent_launch, version, has in (
        (True, f"{GLUON_VERSIONS[0]}9", True),
        (True, "9.0.0", False),
        (False, f"{GLUON_VERSIONS[0]}9", False),
    ):
        monkeypatch.setattr(
            few_rows, "supports_dependent_launch", {CUDA: dependent_launch}.__getitem__
        )
        monkeypatch.setattr("triton.__version__", version)
        assert has_few_rows_kernel(CUDA) == has


@pytest.mark.gpu
@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_a_product_of_few_rows_equals_its_reference(
    rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Plain, into float32, behind a norm, gated by SiLU and by GELU, and into a residual, and all
    but the second with a bias; rows of x have gaps."""
    outputs, inputs = shape
    x = random(rows, 2 * inputs, dtype=dtype, seed=0)[:, :inputs]
    weight = random(outputs, inputs, dtype=dtype, seed=1) * inputs**-0.5
    norm = random(inputs, dtype=dtype, seed=2)
    residual = random(rows, outputs, dtype=dtype, seed=3)
    bias = random(outputs, dtype=dtype, seed=4)
    results = []
    for kernels in (told_set(), TorchKernels()):
        exact = torch.empty(rows, outputs, dtype=torch.float32, device=CUDA)
        results.append(
            (
                kernels.linear(x, weight),
                kernels.linear(x, weight, None, exact),
                kernels.norm_linear(x, norm, EPS, weight),
                kernels.norm_gate_up(x, norm, EPS, weight),
                kernels.linear_add(x, weight, residual.clone()),
                kernels.linear(x, weight, bias),
                kernels.norm_linear(x, norm, EPS, weight, bias),
                kernels.norm_gate_up(x, norm, EPS, weight, bias),
                kernels.linear_add(x, weight, residual.clone(), bias),
                *(gelu_gate_up(kernels, x, weight, one) for one in (None, bias)),
            )
        )
    ours, reference = results
    assert_close_report(ours[1], reference[1], rel_norm=1e-5)
    for actual, expected in zip(ours, reference, strict=True):
        assert actual.dtype == expected.dtype
        assert_close_report(actual.float(), expected.float(), rel_norm=REL_NORM[dtype])


@pytest.mark.gpu
@pytest.mark.usefixtures("with_kernel")
def test_a_row_has_its_bits_whatever_is_beside_it() -> None:
    """And all rows have them at each run, alone and among others that are not a number."""
    x, weight = (random(n, 1024, dtype=torch.bfloat16, seed=n) for n in (8, 2048))
    kernels = told_set()
    first = kernels.linear(x, weight)
    assert torch.equal(first, kernels.linear(x, weight))
    x[1:] = float("nan")
    assert torch.equal(first[0], kernels.linear(x, weight)[0])
    assert torch.equal(first[0], kernels.linear(x[:2], weight)[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("with_kernel")
def test_a_norm_is_not_made_of_parts_where_the_product_has_none() -> None:
    """The layer then calls the product and the norm."""
    x, weight = (random(n, 1100, dtype=torch.bfloat16, seed=n) for n in (4, 256))
    x, weight = x[:, :1096], weight[:, :1096].contiguous()
    residual, norm = torch.zeros(4, 256, dtype=x.dtype, device=CUDA), weight[0, :256]
    assert TritonKernels().linear_add_norm(x, weight, residual, norm, EPS) is not None
    few = told_set()
    assert few.linear_add_norm(x, weight, residual, norm, EPS) is None
