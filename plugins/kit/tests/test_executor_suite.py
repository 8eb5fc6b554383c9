"""The suite of executors catches executors that lose something, or wait where they must not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.plan import StepPlan, StepResult
from nanovllm_core.interfaces.specs import ExecutorSpec, NoOptions
from nanovllm_core.worker.executor import SingleProcessExecutor
from nanovllm_kit import ExecutorConformance, PluginUnderTest, executor as suite

SUITE = ExecutorConformance()


class Right(SingleProcessExecutor):
    """The core's own, to be spoilt."""


class Loses(SingleProcessExecutor):
    """Never had log-probabilities."""

    def collect(self) -> StepResult:
        return replace(super().collect(), logprobs=None)  # type: ignore[arg-type]


class Forgets(SingleProcessExecutor):
    """Has those of no row."""

    def collect(self) -> StepResult:
        return replace(super().collect(), logprobs={})


class Rounds(SingleProcessExecutor):
    """Sends them as whole numbers."""

    def collect(self) -> StepResult:
        result = super().collect()
        rounded = {
            entry: replace(each, token_logprob=float(round(each.token_logprob)))
            for entry, each in result.logprobs.items()
        }
        return replace(result, logprobs=rounded)


class Waits(SingleProcessExecutor):
    """Takes each result at once, and hands it out when asked."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.results.append(super().collect())

    def collect(self) -> StepResult:
        return self.results.pop(0)


class WaitsForAThread(Waits):
    """The same, with the worker in a thread of its own."""

    def submit(self, plan: StepPlan) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(super().submit, plan).result()


class Elsewhere(Waits):
    """A worker that the suite cannot see."""

    def submit(self, plan: StepPlan) -> None:
        self._running().submit(plan)
        self.results.append(self._running().collect())


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    made: Any = ExecutorConformance
    checkpoint = made.checkpoint.__wrapped__(SUITE, tmp_path)
    return cast(WorkerSetup, made.setup.__wrapped__(SUITE, checkpoint))


def plugin(executor: type[SingleProcessExecutor]) -> PluginUnderTest:
    spec = ExecutorSpec(name="x", impl=f"{__name__}:{executor.__name__}", contract=3)
    return PluginUnderTest(spec, NoOptions(), __name__)


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        (Loses, "logprobs is None, not a mapping"),
        (Forgets, "log-probabilities"),
        (Rounds, "log-probabilities"),
    ],
)
def test_lost_logprobs_are_caught(
    executor: type[SingleProcessExecutor], said: str, setup: WorkerSetup
) -> None:
    """The engine would trip over them at the first request that asks."""
    with pytest.raises(AssertionError, match=said):
        SUITE.test_results_are_those_of_the_core(plugin(executor), setup)
    SUITE.test_results_are_those_of_the_core(plugin(Right), setup)


@pytest.mark.parametrize("executor", [Waits, WaitsForAThread])
def test_waiting_in_submit_is_caught(
    executor: type[SingleProcessExecutor], setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's thread, or for another one."""
    monkeypatch.setattr(suite, "PATIENCE", 0.1)
    with pytest.raises(AssertionError, match="submit waited for the result of a step"):
        SUITE.test_submit_does_not_wait_for_the_step(plugin(executor), setup, monkeypatch)


def test_a_worker_that_is_out_of_reach_proves_nothing(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.skip.Exception, match="no SingleProcessExecutor of this process"):
        SUITE.test_submit_does_not_wait_for_the_step(plugin(Elsewhere), setup, monkeypatch)
