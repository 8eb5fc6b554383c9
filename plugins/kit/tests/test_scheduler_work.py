"""Steps of work are counted wherever a loop runs: in lines, in built-ins, on numbers and ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random
from typing import Any

import pytest

from nanovllm_kit.scheduler_growth import draw_queue
from nanovllm_kit.scheduler_watch import ReadOnlyRequest
from nanovllm_kit.scheduler_work import (
    CountedQueue,
    CountedRequest,
    Meter,
    TooMuchWorkError,
    work_limit,
)

N = 60
Work = Callable[[Sequence[Any]], object]


def steps(work: Work) -> int:
    """Of some work on N requests."""
    meter = Meter()
    views = [ReadOnlyRequest(view) for view in draw_queue(Random(0), N)]
    requests = [CountedRequest(view, meter) for view in views]
    with meter.at_most(10**9, "work"):
        work(requests)
    return meter.steps


def numbers(requests: Sequence[Any]) -> list[Any]:
    return [request.arrival_index for request in requests]


@pytest.mark.parametrize(
    "work",
    [
        lambda rs: [1 for _ in rs for _ in rs],
        lambda rs: [r in rs for r in rs],
        lambda rs: [rs.index(r) for r in rs],
        lambda rs: [r.request_id in ids for ids in [[r.request_id for r in rs]] for r in rs],
        lambda rs: [min(some) for some in [numbers(rs)] for _ in rs],
        lambda rs: [sum(some) for some in [numbers(rs)] for _ in rs],
        lambda rs: [sorted(some) for some in [numbers(rs)] for _ in rs],
        lambda rs: [[*map(attrgetter("priority"), rs)] for _ in rs],
        lambda rs: [set(rs) for _ in rs],
    ],
)
def test_a_loop_in_a_loop_is_counted_whoever_runs_it(work: Work) -> None:
    assert N * N // 2 <= steps(work) <= 10 * N * N


def test_one_look_at_each_and_a_sort_stay_far_below_the_limit() -> None:
    assert steps(lambda rs: [r for r in rs]) <= 2 * N
    assert steps(lambda rs: sorted(rs, key=lambda r: r.arrival_index)) < work_limit(N) / 5


def test_an_index_into_the_queue_counts_the_walk() -> None:
    meter = Meter()
    queue = CountedQueue([ReadOnlyRequest(view) for view in draw_queue(Random(0), N)], meter)
    assert queue[-1].request_id == f"r{N - 1}"
    assert meter.steps == N


def test_a_call_ends_at_its_limit_and_the_tracer_before_goes_on() -> None:
    """Coverage and debuggers trace too."""

    def tracer(*_event: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    meter = Meter()
    requests = [CountedRequest(ReadOnlyRequest(v), meter) for v in draw_queue(Random(0), N)]
    limited = pytest.raises(TooMuchWorkError, match="it took more than 50 steps")
    try:
        with limited, meter.at_most(50, "it"):
            numbers(requests)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
