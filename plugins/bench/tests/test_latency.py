"""Latency: when requests arrive, what their clocks measure, and percentiles of raw times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanovllm_bench.latency import Trace, arrival_times, percentiles, trace_requests
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import fixed_workload
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams

STEP_SECONDS = 0.05


def test_fixed_arrivals_are_evenly_spaced() -> None:
    assert arrival_times(4, 2.0, "fixed") == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed_alone() -> None:
    times = arrival_times(4000, 8.0, "poisson", seed=3)
    assert times == arrival_times(4000, 8.0, "poisson", seed=3)
    assert times != arrival_times(4000, 8.0, "poisson", seed=4)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.05)


def test_an_infinite_rate_lets_all_arrive_at_once() -> None:
    assert arrival_times(3, float("inf"), "poisson") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0 requests per second"):
        arrival_times(3, rate, "fixed")


class SlowSteps:
    """A door whose steps take 50 ms of the event loop's time, one for each token."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    async def generate(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked.append(params)
        for _ in range(params.max_tokens):
            time.sleep(STEP_SECONDS)  # not asyncio's: the loop is busy
            yield SimpleNamespace(new_token_ids=[7])
            await asyncio.sleep(0)


def traced(llm: object, arrivals: list[float]) -> Trace:
    workload = fixed_workload(len(arrivals), 4, 2)
    return asyncio.run(trace_requests(cast(Any, llm), workload, arrivals, 0.6))


def test_a_clock_starts_at_the_arrival_also_while_the_loop_is_busy() -> None:
    """The second request arrives in the middle of a step, and its wait counts."""
    trace = traced(SlowSteps(), [0.0, 0.01, 0.3])
    assert trace.arrivals == [0.0, 0.01, 0.3]
    assert trace.first_token_ms()[1] >= 2 * 50 - 10
    assert trace.seen[2][0] >= 0.3 + STEP_SECONDS
    assert min(trace.inter_token_ms()) >= 50


def test_no_request_waits_for_the_answer_to_another() -> None:
    """The first one is answered only after the second one has come."""

    class Meeting:
        def __init__(self) -> None:
            self.both = asyncio.Barrier(2)

        async def generate(
            self, prompt: list[int], params: SamplingParams
        ) -> AsyncIterator[SimpleNamespace]:
            await self.both.wait()
            yield SimpleNamespace(new_token_ids=[7])

    trace = traced(Meeting(), [0.0, 0.01])
    assert min(seen[0] for seen in trace.seen) >= 0.01


def test_an_error_ends_the_run_without_waiting_for_later_arrivals() -> None:
    class Refusing:
        async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[None]:
            raise OSError("the device is gone")
            yield

    started = time.perf_counter()
    with pytest.raises(OSError, match="the device is gone"):
        traced(Refusing(), [0.0, 60.0])
    assert time.perf_counter() - started < 30


def test_no_default_of_a_checkpoint_changes_what_is_measured() -> None:
    """Latency and throughput state every field that a checkpoint may have a default for."""
    door = SlowSteps()
    traced(door, [0.0, 0.0])
    asked: list[Any] = []

    def generate(prompts: Any, params: Any, use_tqdm: bool) -> list[SimpleNamespace]:
        asked.extend(params)
        return [SimpleNamespace(token_ids=[7] * one.max_tokens) for one in params]

    llm: Any = SimpleNamespace(reset_prefix_cache=lambda: None, generate=generate)
    timed_generate(llm, fixed_workload(2, 4, 2), 0.6)
    assert len(asked + door.asked) == 4
    for params in asked + door.asked:
        assert params.choice(dict.fromkeys(NEUTRAL, 0.5)) == {**NEUTRAL, "temperature": 0.6}


def test_times_between_tokens_do_not_cross_requests() -> None:
    assert Trace([0.0, 0.0], [[1.0, 1.5], [9.0]]).inter_token_ms() == [500.0]


def test_percentiles_are_of_all_values() -> None:
    assert percentiles(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
