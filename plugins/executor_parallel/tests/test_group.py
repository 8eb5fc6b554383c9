"""Errors in a collective: another rank's end, or this rank's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nanovllm_executor_parallel.group import Progress
from nanovllm_executor_parallel.messages import LostPeerError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(
    "error", [RuntimeError(GLOO), dist.DistNetworkError("reset"), dist.DistBackendError("NCCL")]
)
def test_a_lost_connection_is_another_rank_s_failure(error: RuntimeError) -> None:
    """The engine looks for that rank. The collective has its number."""
    with (
        pytest.raises(LostPeerError, match=r"^all_reduce 1: "),
        Progress().collective("all_reduce"),
    ):
        raise error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), RuntimeError("a shape")])
def test_other_errors_are_the_rank_s_own(error: RuntimeError) -> None:
    """They keep their types."""
    with pytest.raises(type(error)) as caught, Progress().collective("all_reduce"):
        raise error
    assert caught.value is error
