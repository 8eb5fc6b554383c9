"""Latency: when requests arrive, what their clocks measure, and percentiles of raw times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_bench.latency import Trace, arrival_times, percentiles, trace_requests
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import fixed_workload
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.sampling_params import NEUTRAL


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


class OneSecondSteps:
    """An engine whose steps take a second and give every request its next token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: dict[str, int] = {}
        self.asked: list[Any] = []

    def add_request(self, name: str, prompt: Any, params: Any, *, stream: bool) -> None:
        assert stream, "tokens must be seen as they come"
        self.left[name] = params.max_tokens
        self.asked.append(params)

    def has_unfinished(self) -> bool:
        return bool(self.left)

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(running=len(self.left))

    def step(self) -> list[SimpleNamespace]:
        self.now += 1.0
        outputs = [SimpleNamespace(request_id=name, new_token_ids=[7]) for name in self.left]
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return outputs

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_clock_starts_at_the_arrival_also_while_the_engine_is_busy() -> None:
    """The second request arrives in the middle of a step, and its wait counts."""
    engine: Any = OneSecondSteps()
    workload = fixed_workload(3, 4, 2)
    trace = trace_requests(
        engine, workload, [0.0, 0.25, 10.0], 0.0, clock=lambda: engine.now, sleep=engine.sleep
    )
    assert trace.seen == [[1.0, 2.0], [2.0, 3.0], [11.0, 12.0]]
    assert trace.first_token_ms() == [1000.0, 1750.0, 1000.0]
    assert trace.inter_token_ms() == [1000.0] * 3


def test_no_default_of_a_checkpoint_changes_what_is_measured() -> None:
    """Latency and throughput state every field that a checkpoint may have a default for."""
    engine: Any = OneSecondSteps()
    workload = fixed_workload(2, 4, 2)
    trace_requests(engine, workload, [0.0, 0.0], 0.6, clock=lambda: engine.now, sleep=engine.sleep)
    asked: list[Any] = []

    def generate(prompts: Any, params: Any, use_tqdm: bool) -> list[SimpleNamespace]:
        asked.extend(params)
        return [SimpleNamespace(token_ids=[7] * one.max_tokens) for one in params]

    llm: Any = SimpleNamespace(reset_prefix_cache=lambda: None, generate=generate)
    timed_generate(llm, workload, 0.6)
    assert len(asked + engine.asked) == 4
    for params in asked + engine.asked:
        assert params.choice(dict.fromkeys(NEUTRAL, 0.5)) == {**NEUTRAL, "temperature": 0.6}


def test_times_between_tokens_do_not_cross_requests() -> None:
    assert Trace([0.0, 0.0], [[1.0, 1.5], [9.0]]).inter_token_ms() == [500.0]


def test_percentiles_are_of_all_values() -> None:
    assert percentiles(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
