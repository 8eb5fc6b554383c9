"""Bugs planted in the Triton kernels that norm the sum of a product's parts, found on a CPU.

Mutations keep every access within the tensors: the interpreter uses real memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .mutation import Mutation, Subject, numbered

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there, and are not interpreted"
)

NORMING = Subject(
    package="nanovllm_kernels_triton",
    suite="""
import pytest
import torch
from nanovllm_core.kernels import TorchKernels
from COPY.kernel_set import TritonKernels
from COPY.linear import LinearLauncher
from COPY.linear_choice import choose_parts
from nanovllm_kit.kernel_large import LargeStateChecks
from nanovllm_kit.kernel_norming import NormingChecks
from nanovllm_kit.kernel_post_norm import PostNormChecks
from nanovllm_kit.numerics import assert_close_report

class TestCopy(NormingChecks, PostNormChecks, LargeStateChecks):
    @pytest.fixture
    def kernels(self):
        return TritonKernels()

    @pytest.fixture
    def device(self):
        return torch.device("cpu")

    @pytest.fixture
    def dtype(self):
        return torch.float16

    def test_a_float32_weight(self):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 1100).half(), (torch.randn(200, 1100) / 33).half()
        residual, norm = torch.randn(3, 200).half(), torch.randn(200)
        total, normed = TritonKernels().linear_add_norm(x, weight, residual, norm, 1e-2)
        assert_close_report(normed, TorchKernels().rms_norm(total, norm, 1e-2), rel_norm=1.2e-4)

    def test_the_bits_of_tickets(self):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 1100).half(), (torch.randn(200, 1100) / 33).half()
        residual, norm = torch.randn(3, 200).half(), torch.randn(200).half()
        plan = choose_parts(3, 200, 1100, torch.float16)
        expected = LinearLauncher().run(plan, x, weight, residual_TN=residual.clone())
        total, _ = TritonKernels().linear_add_norm(x, weight, residual, norm, 1e-2)
        assert torch.equal(total, expected)
""",
)
AT_ONCE = "test_a_product_and_a_norm_at_once_equal_the_two_one_by_one"
THREE = "test_a_norm_a_sum_and_a_norm_at_once_equal_the_three_one_by_one"
GELU = "test_a_product_gated_by_gelu_equals_the_operations_one_by_one"
LARGE_SUM = "test_a_large_sum_behind_a_product_is_normed_in_float32"
LARGE_PRODUCT = "test_a_product_of_large_states_norms_them_in_float32"
ONE_ROUNDING, BITS = "test_a_float32_weight", "test_the_bits_of_tickets"
NORM, PRODUCT, SET = "elementwise.py", "linear.py", "kernel_set.py"
SUM = "x = (total + residual.to(tl.float32)).to(residual.dtype)"
RESIDUAL = """row * residual_stride + columns
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    total = tl.zeros"""
PLACE = "(part * num_tokens + row) * SIZE + columns"
STORED = "        tl.store(ptrs, y, mask=mask)"


def bug(name: str, file: str, caught_by: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name=name, file=file, edits=edits, caught_by=caught_by)


MUTATIONS = [
    bug(
        "both norms have the first one's epsilon", NORM, THREE,
        ("rms_normed(total, next_weight, SIZE, NEXT_EPS)",
         "rms_normed(total, next_weight, SIZE, EPS)"),
    ),
    bug(
        "the second norm is of the addend", NORM, THREE,
        ("rms_normed(total, next_weight,", "rms_normed(addend.to(total.dtype), next_weight,"),
    ),
    bug(
        "the addend is not normed", NORM, THREE,
        ("addend = rms_normed(x, weight, SIZE, EPS).to(tl.float32)", "addend = x.to(tl.float32)"),
    ),
    bug(
        "GELU has another cubic term", PRODUCT, GELU,
        ("0.07135481627260025", "0.1"),
    ),
    bug(
        "a product that is gated by GELU is gated by SiLU", PRODUCT, GELU,
        ("y = activated(gate, GELU) * up", "y = activated(gate, False) * up"),
    ),
    bug("the last part is left out", NORM, AT_ONCE, ("range(PARTS)", "range(PARTS - 1)")),
    bug("the first part counts for all", NORM, AT_ONCE, (PLACE, PLACE.replace("part *", "0 *"))),
    bug(
        "parts lie token by token", NORM, AT_ONCE,
        (PLACE, "(row * PARTS + part) * SIZE + columns"),
    ),
    bug("the residual is left out", NORM, AT_ONCE, (SUM, "x = total.to(residual.dtype)")),
    bug("the sum is not stored", NORM, AT_ONCE, ("tl.store(residual_ptrs, x, mask=mask)", "pass")),
    bug(
        "rows of the residual lie side by side", NORM, AT_ONCE,
        (RESIDUAL, RESIDUAL.replace("residual_stride", "SIZE")),
    ),
    bug(
        "columns of padding count in the sum", NORM, AT_ONCE,
        ("tl.load(part_ptrs, mask=mask, other=0.0)", "tl.load(part_ptrs, mask=mask, other=1.0)"),
    ),
    bug(
        "columns of padding count in the mean", NORM, AT_ONCE,
        ("tl.sum(wide * wide, axis=0) / SIZE", "tl.sum(wide * wide, axis=0) / x.shape[0]"),
    ),
    bug(
        "epsilon is left out", NORM, AT_ONCE,
        ("tl.sum(wide * wide, axis=0) / SIZE + EPS", "tl.sum(wide * wide, axis=0) / SIZE"),
    ),
    bug(
        "squares are summed in the dtype of the states", NORM, LARGE_SUM,
        ("wide = x.to(tl.float32)\n    return", "wide = x\n    return"),
    ),
    bug(
        "a product sums squares in the dtype of the states", PRODUCT, LARGE_PRODUCT,
        ("square = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=0)",
         "square = tl.sum(x * x, axis=0).to(tl.float32)"),
    ),
    bug(
        "the sum is normed before it is rounded", NORM, ONE_ROUNDING,
        (
            "x, mask=mask)\n    out = rms_normed(x,",
            "x, mask=mask)\n    out = rms_normed(total + residual.to(tl.float32),",
        ),
    ),
    bug(
        "a float32 weight rounds twice", PRODUCT, ONE_ROUNDING,
        ("if norm_weight.dtype == x.dtype:", "if True:"),
    ),
    bug(
        "the sum is rounded before the residual", NORM, BITS,
        (SUM, SUM.replace("total", "total.to(residual.dtype).to(tl.float32)")),
    ),
    bug(
        "parts overlap", PRODUCT, AT_ONCE,
        ("tl.program_id(1) * num_rows * OUTPUTS", "tl.program_id(1) * OUTPUTS"),
    ),
    bug("parts are rounded", PRODUCT, BITS, (STORED, STORED.replace("y,", "y.to(tl.float16),"))),
    bug(
        "a bias is left out", SET, AT_ONCE,
        ("if plan is None or bias_E is not None:", "if plan is None:"),
    ),
    bug(
        "the norm lies over its residual", SET, AT_ONCE,
        ("return residual_TE, normed_TE", "return residual_TE.copy_(normed_TE), residual_TE"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", numbered([one.name for one in MUTATIONS], every=12))
def test_a_planted_bug_is_caught(number: int, tmp_path: Path) -> None:
    """By the check that is about it."""
    NORMING.assert_caught(tmp_path, number, MUTATIONS[number])


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    """So what fails is the bug."""
    NORMING.assert_passes(tmp_path, MUTATIONS)
