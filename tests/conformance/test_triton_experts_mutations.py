"""Bugs planted in the Triton kernels for mixtures of experts, found on a CPU by the interpreter.

Mutations keep every read within the tensors: the interpreter reads real memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .mutation import Mutation, Subject, numbered

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there, and are not interpreted"
)

EXPERTS = Subject(
    package="nanovllm_kernels_triton",
    suite="""
import pytest
import torch
from nanovllm_core.api import Routing
from nanovllm_core.kernels import TorchKernels, launch_options
from COPY import experts, norm_rank, norm_route
from COPY.kernel_set import TritonKernels
from COPY.experts_choice import FewExperts, FewPlan, GroupedPlan, ManyExperts

OPTIONS = launch_options(dependent_launch=False)
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 6, 40, 24

def check(tokens, plan):
    torch.manual_seed(0)
    scores = torch.rand(tokens, NUM_EXPERTS)
    scores[:, 4] += 0.5  # has several tiles
    weights, ids = scores.topk(3, dim=1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 6
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / 5
    inputs = (torch.randn(tokens, HIDDEN), weights, ids.int(), gate_up, down)
    actual, expected = experts.run_experts(*inputs, OPTIONS, plan), TorchKernels().experts(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

def no_choice(x, routing):  # so that a rank which no expert has reads what is there
    return torch.zeros(1, routing.num_chosen), torch.zeros(1, routing.num_chosen).int()

class TestCopy:
    @pytest.mark.parametrize("routing, has_bias", [
        (Routing(top_k=3, scale=2.0), False),
        (Routing(top_k=3, renormalize=True), False),
        (Routing(top_k=3, renormalize=True), True),
        (Routing(top_k=3, renormalize=True, scoring="sigmoid", scale=2.5), True),
        (Routing(top_k=2, scoring="sigmoid", num_shared=2), True),
    ])
    def test_norm_experts(self, routing, has_bias, monkeypatch):
        monkeypatch.setattr(norm_route, "MULTIPROCESSORS", 10)
        monkeypatch.setattr(norm_rank, "empty_choice", no_choice)
        torch.manual_seed(0)
        kernels, reference = TritonKernels(), TorchKernels()
        norm, weight = torch.rand(HIDDEN) + 0.5, torch.randn(65, HIDDEN) / 3
        bias = (torch.arange(130) * 5 % 13 / 4) if has_bias else None
        gate_up = torch.randn(130 + routing.num_shared, 2 * INTERMEDIATE, HIDDEN) / 6
        down = torch.randn(130 + routing.num_shared, HIDDEN, INTERMEDIATE) / 5
        for scale in (1.0, 1.0, -200.0):  # of the last all scores of a sigmoid underflow
            x = torch.rand(1, HIDDEN)
            weight = weight if scale > 0 else torch.full_like(weight, scale / HIDDEN)
            normed = reference.rms_norm(x, norm, 1e-6)
            logits = (normed @ weight.t()).repeat(1, 2)  # of each two are equal
            expected = x + reference.experts(
                normed, *reference.route(logits, routing, bias), gate_up, down, routing.num_shared
            )
            actual = kernels.norm_experts(
                x, norm, 1e-6, weight.repeat(2, 1), routing, bias, gate_up, down, x
            )
            assert actual is x
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            assert (kernels._logits == -1).all()  # no logit stays where it has passed

    @pytest.mark.parametrize("exact", [False, True])
    def test_norm_route(self, exact):
        torch.manual_seed(0)
        kernels, routing = TritonKernels(), Routing(top_k=3, exact_logits=exact)
        x, norm = torch.randn(2, HIDDEN).half(), torch.rand(HIDDEN).half()
        weight, bias = torch.randn(NUM_EXPERTS, HIDDEN).half(), torch.arange(NUM_EXPERTS) * 3.0
        for _ in range(2):
            weights, ids, normed = kernels.norm_route(x, norm, 1e-6, weight, routing, bias)
            expected = TorchKernels().rms_norm(x, norm, 1e-6)
            torch.testing.assert_close(normed, expected, rtol=2e-3, atol=1e-4)
            assert ids.tolist() == [[5, 4, 3]] * 2
            logits = normed.float() @ weight.float().t()
            logits = logits if exact else logits.half().float()
            scores = logits.softmax(-1).gather(1, ids.long())
            torch.testing.assert_close(weights, scores, rtol=2e-5, atol=1e-7)
            assert (kernels._logits == -1).all()  # no logit stays where it has passed

    @pytest.fixture(autouse=True)
    def few_programs(self, monkeypatch):
        monkeypatch.setattr(experts, "MULTIPROCESSORS", 2)

    @pytest.mark.parametrize("lanes", [1, 4])
    def test_few_pairs(self, lanes):
        plan = FewPlan(8, 16, lanes=lanes)
        check(3, FewExperts(plan, plan))

    @pytest.mark.parametrize("described", [False, True])
    def test_tiles(self, described):
        plan = GroupedPlan(16, 16, 16, 4, 2, 1, described)
        check(30, ManyExperts(plan, plan))

    @pytest.mark.parametrize("block", [2, 32])
    def test_blocks_of_pairs(self, block, monkeypatch):
        monkeypatch.setattr(experts, "_SORT_BLOCK", 1)
        monkeypatch.setattr(experts, "_PLACE_BLOCK", block)
        ids = torch.arange(80)[:, None] ** 2 % 7
        order = experts.sort_pairs(ids.int(), 7, 4, OPTIONS)
        pairs = ids.flatten().argsort(stable=True)
        assert torch.equal(order.rows[pairs].long(), torch.arange(80))
        tiles = order.tiles[:, : int(order.num_tiles)].T.tolist()
        assert sum(min(4, end - first) for _, first, end in tiles) == 80
        for (expert, first, end), of_tile in zip(tiles, order.tile_pairs.tolist()):
            assert of_tile[: end - first] == pairs[first : min(first + 4, end)].tolist()
            assert ids[of_tile[0]] == expert
""",
)

FEW, TILES, BLOCKS = "test_few_pairs", "test_tiles", "test_blocks_of_pairs"
ROUTES, RANKS = "test_norm_route", "test_norm_experts"


def bug(name: str, file: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    file = file if "_" in file else f"experts_{file}"
    return Mutation(name=name, file=f"{file}.py", edits=edits, caught_by=caught_by)


MUTATIONS = [
    bug(
        "a row has the sum of one lane", "few", FEW,
        ("total = tl.sum(y, axis=1)", "total = tl.max(y, axis=1)"),
    ),
    bug(
        "a tile's sums go on into the next", "few", FEW,
        ("mask=outputs < OUTPUTS)\n            y = tl.zeros((BLOCK_N, LANES), tl.float32)",
         "mask=outputs < OUTPUTS)"),
    ),
    bug(
        "the lanes of gate and up are exchanged", "few", FEW,
        ("tl.reshape(tl.sum(y, axis=1), (2, BLOCK_N))",
         "tl.flip(tl.reshape(tl.sum(y, axis=1), (2, BLOCK_N)), 0)"),
    ),
    bug(
        "a token's experts have the weight of its first", "few", FEW,
        ("tl.load(weights_ptr + pair)", "tl.load(weights_ptr + token * CHOSEN)"),
    ),
    bug(
        "a block's own pairs count as those before it", "many", BLOCKS,
        ("(others < block)[:, None]", "(others <= block)[:, None]"),
    ),
    bug(
        "blocks behind the first that are counted are left out", "many", BLOCKS,
        ("range(0, num_blocks, COUNTED)", "range(0, COUNTED, COUNTED)"),
    ),
    bug(
        "each expert has one tile", "many", BLOCKS,
        ("range(block, tl.max(tiles, axis=0), num_blocks)",
         "range(block, tl.minimum(tl.max(tiles, axis=0), 1), num_blocks)"),
    ),
    bug(
        "a pair's row is that in its block alone", "many", BLOCKS,
        ("tl.store(rows_ptr + pairs, places, mask=live)",
         "tl.store(rows_ptr + pairs, lanes, mask=live)"),
    ),
    bug(
        "an expert's pairs are in the opposite order", "many", BLOCKS,
        ("ids * BLOCK + lanes", "ids * BLOCK + BLOCK - 1 - lanes"),
        ("block * BLOCK + keys % BLOCK", "block * BLOCK + BLOCK - 1 - keys % BLOCK"),
    ),
    bug(
        "rows begin at zero for each expert", "many", TILES,
        ("tl.store(rows_ptr + pairs, row + places, mask=is_own)",
         "tl.store(rows_ptr + pairs, places, mask=is_own)"),
    ),
    bug(
        "every tile is stored in the first rows", "many", TILES,
        ("hidden_ptrs = hidden_ptr + rows.to(tl.int64) * OUTPUTS",
         "hidden_ptrs = hidden_ptr + places.to(tl.int64) * OUTPUTS"),
    ),
    bug(
        "a described tile is of the first expert's weights", "many", TILES,
        ("weight_desc.load([expert, first_output, start])",
         "weight_desc.load([0, first_output, start])"),
    ),
    bug(
        "a described tile has the first columns alone", "many", TILES,
        ("hidden_desc.load([first, start])", "hidden_desc.load([first, 0])"),
    ),
    bug(
        "the up rows of a described tile are those of the gate", "many", TILES,
        ("weight_desc.load(place).reshape(2 * BLOCK_N, BLOCK_K)",
         "tl.flip(weight_desc.load(place), 1).reshape(2 * BLOCK_N, BLOCK_K)"),
    ),
    bug(
        "results are summed as if they lay in the order of pairs", "many", TILES,
        ("row = tl.load(rows_ptr + pair)", "row = pair"),
    ),
    bug(
        "logits that have passed stay for the next layer", "norm_route", ROUTES,
        ("tl.full(places.shape, EMPTY, tl.int32)",
         "tl.load(passed_ptr + places, mask=places < NUM_EXPERTS, other=0)"),
    ),
    bug(
        "the experts of all rows go to the first", "norm_route", ROUTES,
        ("weights_ptr + first, ids_ptr + first", "weights_ptr, ids_ptr"),
    ),
    bug("exact logits are rounded", "norm_route", ROUTES, ("if not EXACT:", "if True:")),
    bug("logits are never rounded", "norm_route", ROUTES, ("if not EXACT:", "if False:")),
    bug(
        "the first row's experts are every row's", "norm_route", ROUTES,
        ("x_ptr + token * x_stride", "x_ptr"),
    ),
    bug(
        "the bias is left out", "norm_route", ROUTES,
        ("if bias_ptr is not None:", "if False:"),
    ),
    bug(
        "of equal experts the last come first", "norm_rank", RANKS,
        ("(ids[None, :] < own_ids[:, None])", "(ids[None, :] > own_ids[:, None])"),
    ),
    bug(
        "of equal experts each counts itself", "norm_rank", RANKS,
        ("(ids[None, :] < own_ids[:, None])", "(ids[None, :] <= own_ids[:, None])"),
    ),
    bug(
        "of equal experts all have one rank", "norm_rank", RANKS,
        (" | ((order == own_order) & (ids[None, :] < own_ids[:, None]))", ""),
    ),
    bug(
        "a router has no bias", "norm_rank", RANKS, ("if bias_ptr is not None:", "if False:"),
    ),
    bug(
        "other experts have no bias", "norm_rank", RANKS,
        ("order = _order(scores, bias)", "order = _order(scores, None)"),
    ),
    bug(
        "the bias is in the weight", "norm_rank", RANKS,
        ("weights_ptr + ranks, own_scores,",
         "weights_ptr + ranks, own_scores if own_bias is None else own_scores + own_bias,"),
    ),
    bug(
        "a softmax is not divided", "norm_rank", RANKS,
        ("tl.div_rn(scores, total), tl.div_rn(own_scores, total)", "scores, own_scores"),
    ),
    bug(
        "a softmax is divided by the sum of its own program", "norm_rank", RANKS,
        ("tl.sum(scores, axis=0)", "tl.sum(own_scores, axis=0)"),
    ),
    bug(
        "a bias is added to what is to be divided", "norm_rank", RANKS,
        ("if bias_ptr is not None or not RENORMALIZE:", "if not RENORMALIZE:"),
    ),
    bug(
        "weights that are not divided lose their scale", "norm_rank", RANKS,
        ("own_scores *= SCALE", "own_scores *= 1.0"),
    ),
    bug(
        "weights are scaled twice", "norm_rank", RANKS,
        ("own_scores *= SCALE", "own_scores *= SCALE * SCALE"),
    ),
    bug(
        "a sigmoid is taken for a softmax", "norm_rank", RANKS,
        ("    if SOFTMAX:\n        return", "    if True:\n        return"),
    ),
    bug(
        "shared experts are the first ones", "norm_rank", RANKS,
        ("NUM_EXPERTS + shared", "shared"),
    ),
    bug(
        "shared experts have no weight", "norm_rank", RANKS,
        ("tl.full(shared.shape, 1.0, tl.float32)", "tl.full(shared.shape, 0.0, tl.float32)"),
    ),
    bug(
        "weights are not divided by their sum", "few", RANKS,
        ("(tl.sum(weights, axis=0) + 1e-20)", "(tl.sum(weights, axis=0) * 0.0 + 1.0)"),
    ),
    bug("a sum of 0 divides", "few", RANKS, (" + 1e-20)", ")")),
    bug("weights that are divided lose their scale", "few", RANKS, ("SCALE / (", "1.0 / (")),
    bug(
        "the residual is scaled too", "few", RANKS,
        ("total = tl.sum(y, axis=1)", "total = tl.sum(y, axis=1) + residual.to(tl.float32)"),
        ("            total += residual.to(tl.float32)\n", ""),
    ),
    bug(
        "logits stay behind the down projection", "few", RANKS,
        ("if passed_ptr is not None:", "if False:"),
    ),
    bug(
        "the last logit stays", "few", RANKS,
        ("take_out_logits(passed_ptr, PASSED)", "take_out_logits(passed_ptr, PASSED - 1)"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    EXPERTS.assert_caught(tmp_path, number, MUTATIONS[number])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """So what fails is the bug."""
    EXPERTS.assert_passes(tmp_path)
