"""Products for few rows equal their torch references (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_core.kernels import TorchKernels
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kernels_triton.linear import LinearLauncher
from nanovllm_kernels_triton.linear_choice import (
    MAX_WEIGHTS,
    TILE_ROWS,
    VECTOR_ROWS,
    WIDE_ROWS,
    LinearPlan,
    TilePlan,
    VectorPlan,
    choose,
    choose_gated,
    choose_parts,
)
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly, so it is tested on a GPU only.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
REL_NORM = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
EPS = 1e-6

PLANS: dict[str, LinearPlan] = {
    "vector": VectorPlan(block_n=8, num_warps=4),
    "vector in two parts": VectorPlan(block_n=8, num_warps=4, rest=128),
    "tile": TilePlan(32, 64, splits=1, num_warps=4, num_stages=3),
    "split": TilePlan(16, 32, splits=4, num_warps=4, num_stages=3),
    "uneven": TilePlan(16, 16, splits=3, num_warps=4, num_stages=3),
}
SHAPES = [(1, 32, 64), (3, 40, 100), (5, 22, 200), (37, 22, 100), (70, 22, 100)]
"""(rows, outputs, inputs): whole blocks, ends of blocks in all dimensions, x as wide operand."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def problem(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x with a gap between its rows, norm weight, weight and residual."""
    x = random(rows, 2 * inputs, dtype=dtype)[:, :inputs]
    weight = (random(outputs, inputs, dtype=torch.float32, seed=2) * inputs**-0.5).to(dtype)
    return (
        x,
        random(inputs, dtype=dtype, seed=1),
        weight,
        random(rows, outputs, dtype=dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_product_equals_its_reference(
    plan: LinearPlan, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Plain, behind a norm, gated behind a norm, and into a residual; each with a bias too."""
    x, norm_weight, weight, residual = problem(*shape, dtype)
    bias = random(len(weight), dtype=dtype, seed=4)
    launcher, torch_kernels = LinearLauncher(), TorchKernels()
    norm: dict[str, Any] = {"norm_weight_K": norm_weight, "eps": EPS}
    normed = x
    if isinstance(plan, TilePlan):
        norm, normed = {}, torch_kernels.rms_norm(x, norm_weight, EPS)
    for one in (None, bias):
        options: dict[str, Any] = {"bias_N": one}
        results = {
            "plain": (
                launcher.run(plan, x, weight, **options),
                torch_kernels.linear(x, weight, one),
            ),
            "norm": (
                launcher.run(plan, normed, weight, **norm, **options),
                torch_kernels.norm_linear(x, norm_weight, EPS, weight, one),
            ),
            "gated": (
                launcher.run(plan, normed, weight, **norm, **options, gated=True),
                torch_kernels.norm_gate_up(x, norm_weight, EPS, weight, one),
            ),
            "residual": (
                launcher.run(plan, x, weight, **options, residual_TN=residual.clone()),
                torch_kernels.linear_add(x, weight, residual.clone(), one),
            ),
        }
        for actual, expected in results.values():
            assert actual.dtype == dtype
            assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])


@pytest.mark.parametrize("rows", [1, 3, TILE_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_set_equals_the_reference_whatever_it_chooses(
    rows: int, biased: bool, dtype: torch.dtype
) -> None:
    """Its own kernel for few rows, torch's product for more rows."""
    x, norm_weight, weight, residual = problem(rows, 48, 256, dtype)
    out, bias = torch.full_like(residual, float("nan")), random(48, dtype=dtype, seed=4)
    if not biased:
        bias = None
    results = []
    for kernels in (TritonKernels(), TorchKernels()):
        assert kernels.linear(x, weight, bias, out) is out
        results.append(
            (
                out.clone(),
                kernels.linear(x, weight, bias),
                kernels.norm_linear(x, norm_weight, EPS, weight, bias),
                kernels.norm_gate_up(x, norm_weight, EPS, weight, bias),
                kernels.linear_add(x, weight, residual.clone(), bias),
            )
        )
    for actual, expected in zip(*results, strict=True):
        assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])


@pytest.mark.parametrize("rows", [TILE_ROWS + 1, WIDE_ROWS])
@pytest.mark.parametrize("tiles", [67, 133])
def test_gate_and_up_of_more_rows_equal_their_reference(rows: int, tiles: int) -> None:
    """By tiles with the activation inside, the last of which is not full; with and without bias."""
    x, norm_weight, weight, _ = problem(rows, tiles * 64 - 16, 40, torch.float16)
    assert choose_gated(rows, *weight.shape, torch.float16) is not None
    bias = random(len(weight), dtype=torch.float16, seed=4)
    with Launched() as launched:
        actual = TritonKernels().gate_up(x, weight)
        behind_norm = TritonKernels().norm_gate_up(x, norm_weight, EPS, weight, bias)
    assert launched.names == []
    reference = TorchKernels()
    expected = reference.silu_and_mul(reference.linear(x, weight))
    assert_close_report(actual, expected, rel_norm=1e-3)
    expected = reference.norm_gate_up(x, norm_weight, EPS, weight, bias)
    assert_close_report(behind_norm, expected, rel_norm=1e-3)


class Halved(TritonKernels):
    """A set that derives from this one, with an activation of its own."""

    def silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        return super().silu_and_mul(gate_up_T2F) / 2


def test_an_activation_that_a_derived_set_replaces_is_called_for_many_rows() -> None:
    """Where cuBLAS computes the product, before a norm of the set or behind one."""
    x, norm_weight, weight, _ = problem(WIDE_ROWS + 1, 96, 40, torch.float32)
    for name, arguments in {
        "norm_gate_up": (x, norm_weight, EPS, weight),
        "gate_up": (x, weight),
    }.items():
        halved, whole = (
            getattr(kernels(), name)(*arguments) for kernels in (Halved, TritonKernels)
        )
        assert torch.equal(halved * 2, whole), name


@pytest.mark.parametrize("rows", [1, 4, TILE_ROWS + 1])
def test_a_residual_is_summed_in_place(rows: int) -> None:
    """What is returned is the residual itself: no other memory is written."""
    x, bias, weight, residual = problem(rows, 256, 256, torch.float16)
    for one in (None, bias):
        added = TritonKernels().linear_add(x, weight, residual, one)
        assert added.data_ptr() == residual.data_ptr()


class Launched(TorchDispatchMode):
    """Notes torch's products and sums; Triton's interpreter copies with other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.names += [name] * (name in ("mm", "addmm", "addmm_", "add", "add_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 4, TILE_ROWS + 1])
def test_a_bias_is_a_launch_of_its_own_behind_a_residual_of_many_rows_alone(rows: int) -> None:
    """Kernels of few rows add it, and so does cuBLAS, but to a product that it adds to another."""
    x, bias, weight, residual = problem(rows, 256, 256, torch.float16)
    kernels, out = TritonKernels(), torch.empty_like(residual)
    for product in (
        lambda: kernels.linear(x, weight, bias),
        lambda: kernels.linear(x, weight, bias, out),
        lambda: kernels.norm_linear(x, bias, EPS, weight, bias),
        lambda: kernels.norm_gate_up(x, bias, EPS, weight, bias),
        lambda: kernels.gate_up(x, weight, bias),
    ):
        with Launched() as launched:
            product()
        assert launched.names == ["addmm"] * (rows > TILE_ROWS)
    with Launched() as launched:
        kernels.linear_add(x, weight, residual, bias)
    assert launched.names == ["addmm_", "add_"] * (rows > TILE_ROWS)


@pytest.mark.parametrize("rows", [3, 17, TILE_ROWS, WIDE_ROWS])
@pytest.mark.parametrize("outputs", [40, 1000, 1100])
def test_parts_that_the_norm_sums_have_the_bits_of_those_that_tickets_sum(
    rows: int, outputs: int
) -> None:
    """Of the same plan; rows of the residual have gaps between, and its norm is that of the sum."""
    x, _, weight, residual = problem(rows, outputs, 1100, torch.float16)
    norm_weight = random(outputs, dtype=torch.float16, seed=4)
    plan = choose_parts(rows, outputs, 1100, torch.float16)
    if plan is None:
        assert (rows, outputs) == (WIDE_ROWS, 1100), "more outputs of many rows stay with cuBLAS"
        return
    expected = LinearLauncher().run(plan, x, weight, residual_TN=residual.clone())
    gaps = torch.stack((residual, residual), dim=1)[:, 0]
    result = TritonKernels().linear_add_norm(x, weight, gaps, norm_weight, EPS)
    assert result is not None
    assert result[0] is gaps
    assert torch.equal(gaps, expected)
    normed = TorchKernels().rms_norm(expected, norm_weight, EPS)
    assert_close_report(result[1], normed, rel_norm=REL_NORM[torch.float16])


def test_a_product_of_one_part_or_with_a_bias_is_left_to_two_kernels() -> None:
    """Of one row, of more than a tile's, of few inputs, in float32, and with a bias."""
    half = torch.float16
    for rows, inputs, dtype, biased in (
        (1, 1100, half, False),
        (WIDE_ROWS + 1, 1100, half, False),
        (3, 64, half, False),
        (3, 1100, torch.float32, False),
        (3, 1100, half, True),
    ):
        x, _, weight, residual = problem(rows, 40, inputs, dtype)
        bias = random(40, dtype=dtype, seed=4) if biased else None
        assert TritonKernels().linear_add_norm(x, weight, residual, weight[:, 0], EPS, bias) is None


def test_split_parts_are_counted_anew_by_every_product() -> None:
    """A launcher's products share tickets; none leaves them drawn, and equal inputs, equal bits."""
    x, _, weight, _ = problem(5, 40, 200, torch.float16)
    launcher = LinearLauncher()
    first, second = (launcher.run(PLANS["split"], x, weight) for _ in range(2))
    assert torch.equal(first, second)
    assert launcher._tickets is not None
    assert not launcher._tickets.any()


def test_a_norm_inside_a_tile_plan_is_refused() -> None:
    """Its rows come normed; a norm that is asked for must not be left out."""
    x, norm_weight, weight, _ = problem(1, 32, 64, torch.float16)
    with pytest.raises(ValueError, match=r"takes rows that are normed already"):
        LinearLauncher().run(PLANS["split"], x, weight, norm_weight_K=norm_weight, eps=EPS)


def test_more_tiles_than_tickets_are_refused() -> None:
    """Tickets are allocated once, for captured graphs to keep."""
    x, _, weight, _ = problem(1, 16 * 1025, 8, torch.float16)
    with pytest.raises(ValueError, match=r"1025 tiles cannot be split, only up to 1024"):
        LinearLauncher().run(PLANS["split"], x, weight)


def test_the_rule_of_choice_is_the_documented_one() -> None:
    """Vector for one row or two, tile for few rows in 16 bits, cuBLAS for the rest."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert isinstance(choose(VECTOR_ROWS, 4096, 1024, bf16), VectorPlan)
    assert isinstance(choose(1, 4096, 4096, bf16), VectorPlan)
    assert isinstance(choose(VECTOR_ROWS, 4096, 4096, bf16), TilePlan)
    assert isinstance(choose(VECTOR_ROWS, 4096, 4096, fp32), VectorPlan)
    for rows in (VECTOR_ROWS + 1, TILE_ROWS):
        assert isinstance(choose(rows, 4096, 1024, bf16), TilePlan)
        assert isinstance(choose(rows, 4096, 1024, fp16), TilePlan)
        assert choose(rows, 4096, 1024, fp32) is None
    assert choose(TILE_ROWS + 1, 4096, 1024, bf16) is None
    assert choose(0, 4096, 1024, bf16) is None
    assert isinstance(choose(1, 151936, 1024, bf16), VectorPlan)
    assert isinstance(choose(VECTOR_ROWS, 151936, 1024, bf16), TilePlan)
    assert isinstance(choose(1, MAX_WEIGHTS // 16384, 16384, bf16), VectorPlan)
    assert choose(1, MAX_WEIGHTS // 16384 + 1, 16384, bf16) is None


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        *((inputs, torch.bfloat16) for inputs in (64, 1024, 3072, 5120, 8192, 14336, 17408, 27648)),
        *((inputs, torch.float32) for inputs in (64, 1024, 3072, 8192, 14336, 16384)),
    ],
    ids=str,
)
def test_a_vector_program_holds_256_bytes_in_each_thread_or_fewer(
    inputs: int, dtype: torch.dtype
) -> None:
    """In two parts, 384. Of any model, at least two rows, so that a gated program has its pair."""
    plan = choose(1, 4096, inputs, dtype)
    assert isinstance(plan, VectorPlan)
    padded = 1 << (inputs - 1).bit_length()
    held = padded // 2 + plan.rest if plan.rest else padded
    assert inputs <= held <= padded
    assert plan.block_n >= 2
    most = 384 if plan.rest else 256
    assert plan.block_n * held * dtype.itemsize <= most * 32 * plan.num_warps


@pytest.mark.parametrize(
    ("inputs", "plan"),
    [
        (5120, VectorPlan(4, 4, rest=1024)),
        (6144, VectorPlan(4, 4, rest=2048)),
        (7168, VectorPlan(4, 8)),
        (8192, VectorPlan(4, 8)),
        (12288, VectorPlan(2, 8)),
        (17408, VectorPlan(2, 8, rest=1024)),
        (25600, VectorPlan(2, 16)),
    ],
)
def test_a_long_row_is_loaded_in_two_parts_where_padding_would_be_a_quarter(
    inputs: int, plan: VectorPlan
) -> None:
    """Of half precision; and of outputs for two programs on each multiprocessor, as here 1,056."""
    assert choose(1, 1056, inputs, torch.bfloat16) == plan
    two_rows = choose(2, 1056, inputs, torch.bfloat16)
    assert not isinstance(two_rows, VectorPlan) or two_rows == VectorPlan(2, 4)
    few, exact = choose(1, 1055, inputs, torch.bfloat16), choose(1, 1056, inputs, torch.float32)
    for other in (few, exact):
        assert not isinstance(other, VectorPlan) or not other.rest or inputs > 16384


def test_one_row_of_a_short_weight_is_the_work_of_single_warps() -> None:
    """Two rows, and float32, have programs of several."""
    assert choose(1, 4096, 1024, torch.bfloat16) == VectorPlan(4, 1)
    assert choose(1, 4096, 1000, torch.float16) == VectorPlan(4, 1)
    assert choose(2, 4096, 1024, torch.bfloat16) == VectorPlan(8, 2)
    assert choose(1, 4096, 1024, torch.float32) == VectorPlan(8, 4)


def test_rows_of_4096_are_eight_to_a_program_where_two_on_each_multiprocessor_are_all() -> None:
    """With more outputs there is a second wave, with fewer one program on a multiprocessor."""
    wave = VectorPlan(8, 16)
    plans = {
        outputs: choose(1, outputs, 4096, torch.bfloat16) for outputs in (1056, 1057, 2112, 2113)
    }
    assert plans == {1056: VectorPlan(4, 4), 1057: wave, 2112: wave, 2113: VectorPlan(4, 4)}
    assert choose(1, 2048, 4096, torch.float32) == VectorPlan(4, 8)


@pytest.mark.parametrize(("rows", "num_warps"), [(1, 4), (2, 2)])
def test_one_row_s_product_behind_a_mixture_has_twice_the_warps(
    rows: int, num_warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weight that was announced, and of no other; the result is the reference's."""
    x, norm_weight, weight, _ = problem(rows, 48, 2048, torch.float16)
    kernels, plans = TritonKernels(), []
    run = LinearLauncher.run

    def noted(self: LinearLauncher, plan: LinearPlan, *arguments: Any, **keywords: Any) -> Tensor:
        plans.append(plan)
        return run(self, plan, *arguments, **keywords)

    monkeypatch.setattr(LinearLauncher, "run", noted)
    kernels.norm_linear(x, norm_weight, EPS, weight)
    kernels.announce_weight(random(2, 4, 6, dtype=torch.float16), weight)
    actual = kernels.norm_linear(x, norm_weight, EPS, weight)
    kernels.norm_linear(x, norm_weight, EPS, weight.clone())
    assert plans == [VectorPlan(4, warps) for warps in (2, num_warps, 2)]
    expected = TorchKernels().norm_linear(x, norm_weight, EPS, weight)
    assert_close_report(actual, expected, rel_norm=REL_NORM[torch.float16])


def test_rows_of_a_weight_that_no_program_can_hold_take_the_next_line() -> None:
    """32,768 numbers of 16 bits, or 16,384 in float32."""
    assert isinstance(choose(1, 4096, 32768, torch.bfloat16), VectorPlan)
    assert isinstance(choose(1, 4096, 32769, torch.bfloat16), TilePlan)
    assert choose(1, 4096, 16385, torch.float32) is None


@given(
    rows=st.integers(2, TILE_ROWS),
    outputs=st.integers(1, 1 << 18),
    inputs=st.integers(1, 1 << 15),
)
def test_a_split_is_one_wave_and_leaves_no_part_empty(rows: int, outputs: int, inputs: int) -> None:
    """Two programs a multiprocessor at most; two steps or more where the inputs are split."""
    plan = choose(rows, outputs, inputs, torch.bfloat16)
    if not isinstance(plan, TilePlan) or plan.splits == 1:
        return
    assert -(-inputs // plan.block_k) // plan.splits >= 2
    assert -(-outputs // plan.block_n) * plan.splits <= 2 * 132


@given(
    rows=st.integers(1, WIDE_ROWS + 1),
    outputs=st.integers(1, 1 << 14),
    inputs=st.integers(1, 1 << 15),
)
def test_parts_for_the_norm_fill_the_multiprocessors_once(
    rows: int, outputs: int, inputs: int
) -> None:
    """There are two or more, and no more than where tickets sum them, or of more rows than 8."""
    split, parts = (f(rows, outputs, inputs, torch.bfloat16) for f in (choose, choose_parts))
    if parts is None:
        is_split = isinstance(split, TilePlan) and split.splits > 1
        assert not is_split or 2 * _tiles(split, outputs) > 132
        return
    most = split.splits if isinstance(split, TilePlan) else 8
    assert 2 <= parts.splits <= most
    assert _tiles(parts, outputs) * parts.splits <= 132
    assert -(-inputs // parts.block_k) // parts.splits >= 2


@given(
    rows=st.integers(TILE_ROWS + 1, WIDE_ROWS + 1),
    outputs=st.integers(1, 1 << 16),
    inputs=st.integers(1, 1 << 15),
)
def test_gate_and_up_of_more_rows_take_tiles_that_fill_their_waves(
    rows: int, outputs: int, inputs: int
) -> None:
    """One wave in which half of the multiprocessors work, or waves with few idle places."""
    plan = choose_gated(rows, outputs, inputs, torch.bfloat16)
    assert choose_gated(rows, outputs, inputs, torch.float32) is None
    if rows > WIDE_ROWS or outputs * inputs > MAX_WEIGHTS:
        assert plan is None
    if plan is None:
        return
    assert isinstance(plan, TilePlan)
    assert plan.splits == 1
    stage = (128 + plan.block_n) * plan.block_k * 2
    resident = 227 * 1024 // (plan.num_stages * stage) * 132
    tiles = _tiles(plan, outputs)
    assert tiles >= 66
    assert tiles <= resident or 3 * -(-tiles // resident) * resident <= 4 * tiles


def _tiles(plan: TilePlan, outputs: int) -> int:
    return -(-outputs // plan.block_n)


@pytest.mark.parametrize("inputs", [1024, 3072, 4096, 9728, 25600])
@pytest.mark.parametrize("rows", [16, 64])
def test_few_outputs_of_long_rows_are_shared_by_several_programs(rows: int, inputs: int) -> None:
    """Fewer tiles than multiprocessors would leave most of them without a weight to stream."""
    for outputs in (1024, 2048, 2560, 4096, 5120):
        plan = choose(rows, outputs, inputs, torch.bfloat16)
        if plan is None:
            assert (rows, outputs) == (64, 5120), "the one case of these in which cuBLAS is faster"
            continue
        assert isinstance(plan, TilePlan)
        programs = -(-outputs // plan.block_n) * plan.splits
        assert programs >= 120 or -(-inputs // plan.block_k) // plan.splits < 16


@given(rows=st.integers(33, TILE_ROWS), tiles=st.integers(265, 1024))
def test_tiles_of_many_outputs_do_not_begin_a_wave_that_others_would_not_need(
    rows: int, tiles: int
) -> None:
    """Of the two kinds of tiles, the one with fewer idle places in its last wave is taken."""
    plan = choose(rows, tiles * 64, 4096, torch.bfloat16)
    assert isinstance(plan, TilePlan)
    resident = {64: 3 * 132, 128: 2 * 132}
    idle = {
        block_n: -(-(tiles * 64) // (block_n * n)) * block_n * n for block_n, n in resident.items()
    }
    assert idle[plan.block_n] <= min(idle.values()) + 64


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 2, 17, 33, TILE_ROWS])
def test_an_output_head_equals_its_reference(rows: int) -> None:
    """The longest product of a model: each of its last outputs too."""
    x, norm_weight, weight, _ = problem(rows, 151936, 1024, torch.bfloat16)
    expected = TorchKernels().norm_linear(x, norm_weight, EPS, weight)
    actual = TritonKernels().norm_linear(x, norm_weight, EPS, weight)
    for part in (slice(None), slice(-100, None)):
        assert_close_report(actual[:, part], expected[:, part], rel_norm=REL_NORM[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 16])
def test_dependent_launch_changes_no_bit(rows: int) -> None:
    """Products that read one another's outputs, captured, with kernels that overlap."""
    x, norm_weight, weight, _ = problem(rows, 1024, 1024, torch.bfloat16)
    results = []
    for dependent in (False, True):
        kernels, residual = TritonKernels(dependent_launch=dependent), x.clone()

        def chain(kernels=kernels, residual=residual) -> None:  # type: ignore[no-untyped-def]
            for _ in range(20):
                hidden = kernels.norm_linear(residual, norm_weight, EPS, weight)
                kernels.linear_add(hidden, weight, residual)

        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        graph.replay()
        results.append(residual.clone())
    assert torch.equal(*results)
