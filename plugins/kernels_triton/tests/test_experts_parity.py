"""Mixtures of experts equal the torch reference by every plan, with more tiles than programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels, launch_options
from nanovllm_kernels_triton import experts, experts_choice
from nanovllm_kernels_triton.experts_choice import (
    FEW_SHARE,
    ExpertsPlan,
    FewExperts,
    FewPlan,
    GroupedPlan,
    ManyExperts,
    choose_experts,
)
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly, so it is tested on a GPU only. Tests against the
# reference bear the marker `gpu` too, though they run in the interpreter as well.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
REL_NORM = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OPTIONS = launch_options(dependent_launch=False)
PLANS: dict[str, ExpertsPlan] = (
    {
        "few pairs": FewExperts(FewPlan(16, 64), FewPlan(16, 32)),
        "few pairs, sums of threads": FewExperts(
            FewPlan(16, 64, lanes=8, signal=99), FewPlan(16, 32, lanes=4, signal=99, ahead=2)
        ),
    }
    | {
        f"{rows} rows": ManyExperts(
            GroupedPlan(rows, 64, 32, 4, 2, 1),
            GroupedPlan(rows, 64 if rows < 64 else 16, 16, 4, 2, 1),
        )
        for rows in (16, 32, 64, 128)
    }
    | {
        f"{rows} rows, described": ManyExperts(
            GroupedPlan(rows, 64, 32, 4, 2, 1, True), GroupedPlan(rows, 16, 16, 4, 2, 1, True)
        )
        for rows in (16, 64)
    }
)
HIDDEN, INTERMEDIATE, NUM_EXPERTS, CHOSEN = 88, 40, 6, 3
"""Whole tiles of nothing."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that each computes several tiles, as it does at the sizes of a model."""
    monkeypatch.setattr(experts, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(experts, "_SORT_BLOCK", 32)
    monkeypatch.setattr(experts, "_PLACE_BLOCK", 16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def tokens_of(name: str) -> int:
    return 4 if isinstance(PLANS[name], FewExperts) else 20


def mixture(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, weights and ids with gaps between their rows; expert 4 has most tokens, expert 2 none."""
    scores = random(tokens, NUM_EXPERTS, seed=1)
    scores[:, 4] += 2
    scores[:, 2] = -torch.inf
    ids = torch.full((tokens, 5), 99, dtype=torch.int32, device=DEVICE)
    ids[:, :CHOSEN] = scores.topk(CHOSEN, dim=1).indices
    return (
        random(tokens, 2 * HIDDEN, dtype=dtype, seed=2)[:, :HIDDEN],
        random(tokens, 7, seed=3)[:, :CHOSEN],
        ids[:, :CHOSEN],
        random(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=dtype, seed=4) / HIDDEN**0.5,
        random(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype, seed=5) / INTERMEDIATE**0.5,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Of sizes in no whole tiles; and a second call has the same bits."""
    inputs = mixture(tokens_of(name), dtype)
    actual = experts.run_experts(*inputs, OPTIONS, PLANS[name])
    assert_close_report(actual, TorchKernels().experts(*inputs), rel_norm=REL_NORM[dtype])
    assert torch.equal(actual, experts.run_experts(*inputs, OPTIONS, PLANS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_adds_the_residual(name: str, dtype: torch.dtype) -> None:
    """In its place, with gaps between its rows, and once for each of its tiles."""
    inputs = mixture(tokens_of(name), dtype)
    residual = 8 * random(len(inputs[0]), 2 * HIDDEN, dtype=dtype, seed=6)
    before, place = residual.clone(), residual[:, :HIDDEN]
    actual = experts.run_experts(*inputs, OPTIONS, PLANS[name], residual_TE=place)
    assert actual.data_ptr() == residual.data_ptr()
    expected = TorchKernels().experts(*inputs, residual_TE=before[:, :HIDDEN])
    assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])
    assert torch.equal(residual[:, HIDDEN:], before[:, HIDDEN:])


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles with a BLAS, and on some processors (OpenBLAS for AVX2)
    the bits of a row depend on its place in the tile, as they never do on a GPU."""

    def multiply(a_MK: Any, b_KN: Any, dtype: Any) -> Any:
        return np.einsum("...mk,...kn->...mn", a_MK, b_KN, dtype=dtype)

    monkeypatch.setattr(np, "matmul", multiply)


@pytest.mark.gpu
@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("name", PLANS)
def test_the_bits_of_a_token_do_not_depend_on_the_others(name: str) -> None:
    """Neither where they are padding, NaN in inputs and weights, nor where they choose anew."""
    x, weights, ids, *matrices = mixture(tokens_of(name), torch.float32)
    expected = experts.run_experts(x, weights, ids, *matrices, OPTIONS, PLANS[name])
    x, weights, ids = x.clone(), weights.clone(), ids.clone()
    others = [token for token in range(len(x)) if token % 3]
    x[others] = torch.nan
    weights[others[:4]] = torch.nan
    ids[others] = torch.tensor([2, 0, 5], dtype=torch.int32, device=DEVICE)
    actual = experts.run_experts(x, weights, ids, *matrices, OPTIONS, PLANS[name])
    assert torch.equal(actual[::3], expected[::3])
    assert actual[others].isnan().all()


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("spread", ["one expert", "uneven", "one pair each"])
def test_pairs_are_sorted_by_expert_and_then_by_token(
    spread: str, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is in one tile, of its expert; the count of tiles is that of those in use."""
    num_experts = 12
    if spread == "uneven":  # more blocks than are counted at once
        monkeypatch.setattr(experts, "_PLACE_BLOCK", 2)
    ids = torch.randint(0, 5, (70, 1), generator=torch.Generator().manual_seed(0))
    if spread == "one expert":
        ids = torch.full((70, 1), 7)
    elif spread == "one pair each":
        ids = torch.arange(num_experts).flip(0)[:, None]
    order = experts.sort_pairs(ids.int().to(DEVICE), num_experts, block_m, OPTIONS)
    flat = ids.flatten()
    sorted_pairs = flat.argsort(stable=True)
    assert torch.equal(order.rows.cpu().long()[sorted_pairs], torch.arange(len(flat)))
    tiles = order.tiles[:, : int(order.num_tiles)].T.tolist()
    pairs = [
        pair
        for (_, first, end), of_tile in zip(tiles, order.tile_pairs.tolist(), strict=False)
        for pair in of_tile[: end - first]
    ]
    assert pairs == sorted_pairs.tolist()
    rows = [
        (expert, row)
        for expert, first, end in tiles
        for row in range(first, min(first + block_m, end))
    ]
    assert rows == [(expert, row) for row, expert in enumerate(sorted(flat.tolist()))]


def test_tiles_have_the_rows_of_an_expert_and_a_few_more() -> None:
    """So most experts have one tile."""
    for tokens, expected in (
        (16, 16), (128, 16), (144, 32), (384, 32), (400, 64), (896, 64), (912, 128), (16384, 128)
    ):  # fmt: skip
        assert rows_of_tiles(tokens, 8, 128) == expected


def test_tiles_are_tall_where_shared_experts_have_many_rows() -> None:
    """One with a row of every token would be cut into many low tiles. In float32, without tensor
    cores, each row of a tall tile takes its time."""
    for tokens, expected in ((16, 16), (32, 16), (40, 64), (256, 64), (1024, 128)):
        assert rows_of_tiles(tokens, 8, 66, num_shared=2) == expected
    assert rows_of_tiles(256, 9, 257, num_shared=1) == rows_of_tiles(256, 8, 256) == 16
    assert rows_of_tiles(64, 8, 66, num_shared=2, itemsize=4) == 16


def rows_of_tiles(
    tokens: int, chosen: int, num_experts: int, *, num_shared: int = 0, itemsize: int = 2
) -> int:
    plan = choose_experts(tokens, chosen, num_experts, 2048, 768, itemsize, 232448, num_shared)
    assert isinstance(plan, ManyExperts)
    assert plan.gate_up.block_m == plan.down.block_m
    return plan.gate_up.block_m


@pytest.mark.parametrize(("num_experts", "chosen"), [(128, 8), (64, 6), (256, 8), (8, 2), (60, 4)])
def test_pairs_are_few_while_most_have_an_expert_of_their_own(
    num_experts: int, chosen: int
) -> None:
    """One token's always; then those of 2, 4, 8... tokens that leave the share if all choose at
    random, and of fewer."""
    generator = torch.Generator().manual_seed(3)
    for tokens in range(1, 33):
        plan = choose_experts(tokens, chosen, num_experts, 2048, 768, 2, 232448)
        power = triton.next_power_of_2(tokens)
        draws = torch.rand(400, power, num_experts, generator=generator)
        ids = draws.topk(chosen).indices.flatten(1)
        share = sum(len(one.unique()) for one in ids) / ids.numel()
        if tokens == 1 or share > FEW_SHARE + 0.01:
            assert isinstance(plan, FewExperts)
        elif share < FEW_SHARE - 0.01:
            assert isinstance(plan, ManyExperts)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (2044, 768), (2048, 764)])
def test_only_whole_16_bytes_are_described(hidden: int, intermediate: int) -> None:
    """The copy engine reads rows that begin at a multiple of 16 bytes."""
    plan = choose_experts(16384, 8, 128, hidden, intermediate, 2, 232448)
    assert isinstance(plan, ManyExperts)
    is_whole = hidden % 8 == 0 and intermediate % 8 == 0
    assert plan.gate_up.described == plan.down.described == is_whole


@pytest.mark.parametrize("outputs", [512, 1544, 2048, 7168])
def test_no_program_of_few_pairs_reads_much_more_than_its_share(outputs: int) -> None:
    """Neither of one token nor of several: weight rows, and the inputs once for each tile."""
    for tokens in range(1, 5):
        plan = choose_experts(tokens, 8, 128, outputs, 768, 2, 232448)
        assert isinstance(plan, FewExperts)
        for part, rows in ((plan.gate_up, 2 * 8 * 768), (plan.down, outputs)):
            programs = part.per_processor * experts_choice.MULTIPROCESSORS
            tiles = tokens * -(-rows // part.block_n)
            busiest = -(-tiles // programs) * (part.block_n + 1)
            assert busiest <= 1.5 * tokens * rows / programs + 3


@pytest.mark.gpu
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_experts_of_prompts_are_dense_products(
    dtype: torch.dtype, with_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the sum once, with the residual or alone, and no pair of theirs is sorted."""
    x, weights, ids, *stacks = mixture(20, dtype)
    ids[:, -2:], weights[:, -2:] = torch.arange(NUM_EXPERTS - 2, NUM_EXPERTS, device=DEVICE), 1.0
    ids[:, 0] %= NUM_EXPERTS - 2
    inputs = (x, weights, ids, *stacks)
    residual = random(len(x), HIDDEN, dtype=dtype, seed=6) if with_residual else None
    expected = TorchKernels().experts(*inputs, 2, None if residual is None else residual.clone())
    sorted_ids = []
    real = experts.sort_pairs

    def noting(ids_TC: Tensor, *arguments: Any) -> experts.Order:
        sorted_ids.append(ids_TC)
        return real(ids_TC, *arguments)

    monkeypatch.setattr(experts, "sort_pairs", noting)
    monkeypatch.setattr(experts_choice, "FEW_SHARE", 2.0)
    choose_experts.cache_clear()
    monkeypatch.setattr(experts_choice, "DENSE_SHARED_TOKENS", 20)
    actual = TritonKernels().experts(*inputs, 2, residual)
    choose_experts.cache_clear()
    assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])
    assert [tuple(one.shape) for one in sorted_ids] == [(20, CHOSEN - 2)]


def test_pairs_are_few_while_few_of_them_read_a_shared_expert_again() -> None:
    """One token's always; those of two with one shared expert."""
    for tokens, num_shared, is_few in ((1, 4, True), (2, 1, True), (2, 2, False), (4, 1, False)):
        plan = choose_experts(
            tokens, 6 + num_shared, 64 + num_shared, 2048, 1408, 2, 232448, num_shared
        )
        assert isinstance(plan, FewExperts) == is_few


@pytest.mark.parametrize(
    ("num_experts", "chosen", "num_shared"),
    [(128, 8, 0), (66, 8, 2), (60, 4, 0), (257, 9, 1), (512, 10, 0), (8, 2, 0)],
)
def test_steps_of_1_2_4_tokens_have_the_kernels_of_all_steps_between(
    num_experts: int, chosen: int, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start tries these and the largest step, and no later one waits for the compiler."""
    launched: list[frozenset[tuple[str, object]]] = []

    class Recorder:
        """In the place of a kernel: its constants."""

        def __getitem__(self, grid: object) -> Recorder:
            return self

        def __call__(self, *_: object, **of: object) -> None:
            launched.append(frozenset(of.items()))

    for kernel in ("sort_pairs_kernel", "count_pairs_kernel", "place_pairs_kernel"):
        monkeypatch.setattr(experts, kernel, Recorder())
    monkeypatch.setattr(experts, "_SORT_BLOCK", 1024)

    def kernels_of(tokens: int) -> set[object]:
        plan = choose_experts(tokens, chosen, num_experts, 2048, 768, 2, 232448, num_shared)
        launched.clear()
        if isinstance(plan, ManyExperts):
            ids_TC = torch.empty(tokens, chosen, dtype=torch.int32)
            experts.sort_pairs(ids_TC, num_experts, plan.gate_up.block_m, OPTIONS)
        return {("gate_up", plan.gate_up), ("down", plan.down), *launched}

    most = 3000
    tried = set[object]().union(*map(kernels_of, [*(2**power for power in range(12)), most]))
    assert all(kernels_of(tokens) <= tried for tokens in range(1, most))


@pytest.mark.gpu
def test_the_router_of_many_experts_in_uneven_groups() -> None:
    """160 in 8 groups of 20, neither of them a power of two, of logits with gaps between rows."""
    routing = Routing(
        top_k=6, scoring="sigmoid", num_groups=8, top_groups=3, group_score="top2", scale=2.5
    )
    logits, bias = random(9, 200, seed=1)[:, :160], random(160, seed=2)
    weights, ids = TritonKernels().route(logits, routing, bias)
    expected_weights, expected_ids = TorchKernels().route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", PLANS)
def test_a_captured_mixture_follows_the_routes_of_its_replay(name: str) -> None:
    """Captured with one choice of experts, replayed with another."""
    x, weights, ids, *matrices = mixture(tokens_of(name), torch.bfloat16)
    ids = ids.contiguous()
    experts.run_experts(x, weights, ids, *matrices, OPTIONS, PLANS[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.run_experts(x, weights, ids, *matrices, OPTIONS, PLANS[name])
    ids.copy_(random(len(x), NUM_EXPERTS, seed=9).topk(CHOSEN, dim=1).indices)
    graph.replay()
    expected = experts.run_experts(x, weights, ids, *matrices, OPTIONS, PLANS[name])
    assert torch.equal(out, expected)
