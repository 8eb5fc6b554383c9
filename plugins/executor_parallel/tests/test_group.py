"""Errors in a collective: another rank's end, or this rank's own; and who sums."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanovllm_executor_parallel import group as group_module
from nanovllm_executor_parallel.group import Progress, TensorParallelGroup
from nanovllm_executor_parallel.messages import LostPeerError
from nanovllm_executor_parallel.plugin import AllReduce

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


@pytest.fixture
def group() -> Iterator[TensorParallelGroup]:
    """A group of one over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TensorParallelGroup(0, 1, Progress())
    dist.destroy_process_group()


def test_a_group_adds_the_residual_behind_the_sum(group: TensorParallelGroup) -> None:
    """In place, if no kernel of its own does both."""
    residual = torch.ones(4)
    assert group.all_reduce_add(torch.arange(4.0), residual) is residual
    assert residual.tolist() == [1, 2, 3, 4]


def test_a_group_without_symmetric_memory_goes_on_and_says_why(
    group: TensorParallelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch cannot have it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the driver has no handles to share")

    monkeypatch.setattr(group_module, "find_obstacle", lambda *_: "")
    monkeypatch.setattr(group_module, "SymmetricAllReduce", fail)
    group.open([torch.device("cpu")], 1, "symmetric")
    assert group.symmetric is None
    assert group.all_reduces == "all-reduces: nccl; the driver has no handles to share"


@pytest.mark.parametrize(
    ("all_reduce", "says"),
    [("nccl", ""), ("auto", "; symmetric was not measured with 1 ranks")],
)
def test_nccl_takes_no_symmetric_memory(
    all_reduce: AllReduce,
    says: str,
    group: TensorParallelGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is what was asked for, or the default where symmetric memory was not measured."""

    def fail(*_: Any) -> None:
        raise AssertionError("nobody asked for symmetric memory")

    monkeypatch.setattr(group_module, "find_obstacle", fail)
    monkeypatch.setattr(group_module, "SymmetricAllReduce", fail)
    group.open([torch.device("cpu")], 1, all_reduce)
    assert group.symmetric is None
    assert group.all_reduces == f"all-reduces: nccl{says}"
    assert not caplog.records


@pytest.mark.parametrize("all_reduce", ["auto", "symmetric"])
def test_symmetric_memory_is_taken_where_it_was_measured(
    all_reduce: AllReduce, group: TensorParallelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the default too."""
    monkeypatch.setattr(group_module, "find_unmeasured", lambda *_: "")
    monkeypatch.setattr(group_module, "find_obstacle", lambda *_: "")
    monkeypatch.setattr(group_module, "SymmetricAllReduce", lambda *_: "one-shot")
    group.open([torch.device("cpu")], 1, all_reduce)
    assert group.all_reduces == "all-reduces: one-shot"


def test_a_wait_in_vain_on_the_device_is_a_lost_rank() -> None:
    """With the way, its call, the rank, the bound, and the option that changes it."""
    group, bounds = TensorParallelGroup(0, 2, Progress()), []
    group.symmetric = SimpleNamespace(missing=lambda: None, bound=bounds.append)  # type: ignore[assignment]
    group.bound(27)
    group.check()
    group.symmetric.missing = lambda: ("two-shot", 1, 7)  # type: ignore
    says = r"^two-shot all_reduce 8 .*: rank 1 .* within 27 s; .*stall_se"
    with pytest.raises(LostPeerError, match=says):
        group.check()
    assert bounds == [27]


def test_a_way_adds_the_residual_itself(group: TensorParallelGroup) -> None:
    """If it takes both; otherwise the residual is added to what the way for x gives."""
    x, residual, calls = torch.ones(4), torch.ones(4), []

    def way(*given: Any) -> Any:
        calls.append(len(given))
        return given[-1]

    group.symmetric = SimpleNamespace(find=lambda *given: way)  # type: ignore[assignment]
    assert group.all_reduce_add(x, residual) is residual
    group.symmetric = SimpleNamespace(find=lambda *given: way if len(given) == 1 else None)  # type: ignore[assignment]
    assert group.all_reduce_add(x, residual).tolist() == [2, 2, 2, 2]
    assert calls == [2, 1]
