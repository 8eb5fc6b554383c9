"""top_k and top_p without sorting keep the very ids that sorting keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from nanovllm_core.kernels import truncation_reference, truncation_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OFF = 2.0
"""A top_p that is no limit."""


def kept(
    cut, logits: Tensor, top_k: list[int], top_p: list[float], temperature: list[float]
) -> Tensor:
    """Which ids of each row survive; the rows go in in reverse, beside one that must not change."""
    others = torch.full_like(logits[:1], 0.5)
    batch = torch.cat([others, logits.flip(0)]).to(DEVICE)
    which = torch.arange(len(logits), 0, -1, device=DEVICE)
    limits = (torch.tensor(top_p, device=DEVICE), torch.tensor(temperature, device=DEVICE))
    cut(batch, which, torch.tensor(top_k, device=DEVICE), *limits)
    assert torch.equal(batch[0].cpu(), others[0])
    survivors = batch[1:].flip(0).cpu() > -math.inf
    assert torch.equal(batch[1:].flip(0).cpu()[survivors], logits[survivors])
    return survivors


def assert_alike(
    logits: Tensor, top_k: list[int], top_p: list[float], temperature: list[float]
) -> Tensor:
    """Both keep the same ids; where rounding decides a top_p, the same number but for one."""
    ours = kept(truncation_triton.cut_top_k_top_p, logits, top_k, top_p, temperature)
    sorting = kept(truncation_reference.cut_top_k_top_p, logits, top_k, top_p, temperature)
    for row, (a, b) in enumerate(zip(ours, sorting, strict=True)):
        slack = int(0 < top_p[row] <= 1)
        assert abs(int(a.sum()) - int(b.sum())) <= slack, f"row {row}: {a.sum()} for {b.sum()}"
        assert bool((a <= b).all()) or bool((b <= a).all()), f"row {row} keeps other ids"
    return ours


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [1, 5, 1024, 3001])
def test_top_k_keeps_exactly_k_ids(vocab: int) -> None:
    """From 1 to all but one, and all."""
    top_k = sorted({1, min(3, vocab), max(1, vocab - 1), vocab})
    logits = random_logits(len(top_k), vocab)
    ours = assert_alike(logits, top_k, [OFF] * len(top_k), [0.7] * len(top_k))
    assert ours.sum(dim=1).tolist() == top_k


def test_of_equal_logits_the_lower_ids_stay() -> None:
    """Also where equals lie in different tiles, and where both zeros are among them."""
    logits = torch.full((3, 5000), -1.0)
    logits[0, [10, 2000, 4000, 4999]] = 2.0
    logits[1, ::2], logits[1, 1::2] = 0.0, -0.0
    ours = assert_alike(logits, [3, 2500, 4000], [OFF] * 3, [1.0] * 3)
    assert ours[0].nonzero().flatten().tolist() == [10, 2000, 4000]
    assert ours[1].nonzero().flatten().tolist() == list(range(2500))
    assert ours[2].nonzero().flatten().tolist() == list(range(4000))


@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_top_p_keeps_the_fewest_ids_that_hold_the_share(temperature: float) -> None:
    """Alone, and among what top_k left."""
    top_p = [1e-30, 0.1, 0.5, 0.9, 0.999, 0.5, 0.9]
    top_k = [2500] * 5 + [2, 40]
    ours = assert_alike(random_logits(7, 2500), top_k, top_p, [temperature] * 7)
    assert ours[0].sum() == 1


def test_equal_probabilities_are_cut_by_their_number() -> None:
    """Half of ten equals is five, after a top_k of four it is two: the lowest ids."""
    logits = torch.full((2, 1500), -math.inf)
    logits[:, 100:1100:100] = 1.0
    ours = kept(truncation_triton.cut_top_k_top_p, logits, [1500, 4], [0.49, 0.49], [1.0, 1.0])
    assert ours[0].nonzero().flatten().tolist() == [100, 200, 300, 400, 500]
    assert ours[1].nonzero().flatten().tolist() == [100, 200]


def test_forbidden_and_infinite_logits_are_ordered_too() -> None:
    """An infinite logit takes all; forbidden ids never count; a row without ids stays empty."""
    logits = torch.full((3, 1200), -math.inf)
    logits[0, [7, 900]] = math.inf
    logits[0, 8] = 50.0
    logits[1, [3, 1100]] = torch.tensor([1.0, 2.0])
    ours = kept(truncation_triton.cut_top_k_top_p, logits, [1200, 5, 3], [0.4, 0.9, 0.5], [1.0] * 3)
    assert ours[0].nonzero().flatten().tolist() == [7]
    assert ours[1].nonzero().flatten().tolist() == [3, 1100]
    assert not ours[2].any()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_logits_are_cut_as_by_sorting(data: st.DataObject) -> None:
    """Few values, so that ties are common, of every sign and size."""
    vocab = data.draw(st.integers(1, 1100), "vocab")
    values = data.draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12), "values")
    seed = data.draw(st.integers(0, 2**31), "seed")
    picks = torch.randint(len(values), (2, vocab), generator=torch.Generator().manual_seed(seed))
    top_k = [data.draw(st.integers(1, vocab), "top_k"), vocab]
    # Away from what equal shares add up to, where rounding would decide about many ids.
    top_p = [OFF, data.draw(st.sampled_from([0.1234567, 0.515151, 0.98765]), "top_p")]
    assert_alike(torch.tensor(values)[picks], top_k, top_p, [1.0, 1.0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 64])
def test_the_compiled_kernel_agrees_at_full_vocabulary(rows: int) -> None:
    """151,936 ids, several cuts, without waiting for the device."""
    top_k = [(151_936, 50, 1000, 151_936)[i % 4] for i in range(rows)]
    top_p = [(0.9, OFF, 0.95, 0.3)[i % 4] for i in range(rows)]
    assert_alike(random_logits(rows, 151_936), top_k, top_p, [0.8] * rows)
