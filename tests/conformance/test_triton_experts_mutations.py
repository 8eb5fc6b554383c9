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
from COPY import experts
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

class TestCopy:
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
        monkeypatch.setattr(experts, "PROCESSORS", 2)

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
ROUTES = "test_norm_route"


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
        ("tl.full(ids.shape, EMPTY, tl.int32)", "passed"),
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
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=4))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    EXPERTS.assert_caught(tmp_path, number, MUTATIONS[number])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """So what fails is the bug."""
    EXPERTS.assert_passes(tmp_path)
