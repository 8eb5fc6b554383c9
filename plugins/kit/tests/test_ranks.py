"""Simulated ranks meet in collectives, and one that fails does not leave the others waiting."""

from __future__ import annotations

import pytest
import torch

from nanovllm_core.layers import TensorParallel
from nanovllm_kit.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_see_every_rank_in_order(size: int) -> None:
    """Sums and concatenations are the same on every rank, call after call."""

    def on_rank(tp: TensorParallel) -> list[list[float]]:
        mine = torch.tensor([float(tp.rank)])
        first, second = tp.all_gather(mine), tp.all_gather(mine + 10)
        return [first.tolist(), second.tolist(), tp.all_reduce(mine).tolist()]

    ranks = [float(rank) for rank in range(size)]
    expected = [ranks, [rank + 10 for rank in ranks], [sum(ranks)]]
    assert run_ranks(size, on_rank) == [expected] * size


def test_the_error_of_one_rank_is_raised() -> None:
    """Not the broken barrier that the others see."""

    def on_rank(tp: TensorParallel) -> None:
        if tp.rank == 1:
            raise ValueError("rank 1 is ill")
        tp.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 is ill"):
        run_ranks(3, on_rank)
