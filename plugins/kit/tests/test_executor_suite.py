"""The suite of executors catches executors that lose something, or wait where they must not."""

from __future__ import annotations

from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from nanovllm_core.errors import ExecutorError
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.plan import StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.interfaces.specs import ExecutorSpec, NoOptions
from nanovllm_core.worker.executor import SingleProcessExecutor
from nanovllm_kit import ExecutorConformance, PluginUnderTest, executor as suite
from nanovllm_kit.executor_plans import all_ids
from nanovllm_kit.plans import decode_plan

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
        worker: Any = self._worker
        worker.submit(plan)
        if not plan.samples_later:
            self.results.append(worker._runner.collect())

    def sample(self, masks: TokenMasks) -> None:
        worker: Any = self._worker
        worker.sample(masks)
        self.results.append(worker._runner.collect())


class KnowsByIdentity(SingleProcessExecutor):
    """Takes another plan object for other rows, for the engine submits the same one again."""

    last = decode_plan(())

    def submit(self, plan: StepPlan) -> None:
        last, self.last = self.last, plan
        if plan is not last and plan.decode_rows is last.decode_rows is None:
            raise ExecutorError("the rows have changed, and the plan lists none")
        super().submit(plan)


class KeepsPlans(SingleProcessExecutor):
    """Repeats the plan that listed the rows where one leaves them out."""

    kept = decode_plan(())

    def submit(self, plan: StepPlan) -> None:
        if plan.decode_rows is not None:
            self.kept = plan
        super().submit(self.kept)


class IgnoresEpochs(SingleProcessExecutor):
    """Takes the first rows that it sees, once and for all."""

    rows: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        if plan.num_decode and self.rows is not None:
            rows = self.rows
            plan = replace(
                plan, epoch=rows.epoch, num_decode=rows.num_decode, decode_rows=rows.decode_rows
            )
        elif plan.num_decode:
            self.rows = plan
        super().submit(plan)


class Mends(SingleProcessExecutor):
    """Has the rows of some epoch, so it serves any."""

    epoch = 0

    def submit(self, plan: StepPlan) -> None:
        if plan.decode_rows is not None:
            self.epoch = plan.epoch
        super().submit(replace(plan, epoch=self.epoch))


class SamplesAtOnce(SingleProcessExecutor):
    """Allows everything as soon as the plan comes, and loses the masks."""

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if plan.samples_later:
            super().sample(all_ids(0))

    def sample(self, masks: TokenMasks) -> None:
        pass


class SamplesLate(SingleProcessExecutor):
    """Uses the masks of the step before."""

    last: TokenMasks | None = None

    def sample(self, masks: TokenMasks) -> None:
        last, self.last = self.last, masks
        super().sample(last or masks)


class FirstMask(SingleProcessExecutor):
    """Sends the masks of one row."""

    def sample(self, masks: TokenMasks) -> None:
        super().sample(TokenMasks(rows=masks.rows[:1], allowed=masks.allowed[:1]))


class NoEmptyMasks(SingleProcessExecutor):
    """Sends nothing where there is nothing to send."""

    def sample(self, masks: TokenMasks) -> None:
        if len(masks.rows):
            super().sample(masks)


class WaitsInSample(SingleProcessExecutor):
    """Takes the result of a step in two parts at once."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.results: list[StepResult] = []

    def sample(self, masks: TokenMasks) -> None:
        super().sample(masks)
        self.results.append(super().collect())

    def collect(self) -> StepResult:
        return self.results.pop(0) if self.results else super().collect()


class MendsMasks(SingleProcessExecutor):
    """Leaves out masks that the step has no use for, and samples where none came."""

    waits = False

    def submit(self, plan: StepPlan) -> None:
        if self.waits:
            super().sample(all_ids(0))
        super().submit(plan)
        self.waits = plan.samples_later

    def sample(self, masks: TokenMasks) -> None:
        if self.waits:
            super().sample(masks)
        self.waits = False


class Widens(SingleProcessExecutor):
    """Sends ids as Python's encoders like them."""

    def collect(self) -> StepResult:
        result = super().collect()
        return replace(result, token_ids=result.token_ids.astype(np.int64))


class Lends(SingleProcessExecutor):
    """Results and the answer to the start hold what no other process can have."""

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        info = super().start(setup)
        return replace(info, start_seconds=Shown(info.start_seconds))

    def collect(self) -> StepResult:
        result = super().collect()
        return replace(result, logprobs=Shown(result.logprobs))


class Shown(UserDict[Any, Any]):
    """A mapping that arrives empty."""

    def __reduce__(self) -> Any:
        return Shown, ()


class OneTable(SingleProcessExecutor):
    """Knows one block table of a row."""

    def submit(self, plan: StepPlan) -> None:
        admissions = tuple(
            replace(one, block_ids=np.repeat(one.block_ids[:1], len(one.block_ids), axis=0))
            for one in plan.admissions
        )
        super().submit(replace(plan, admissions=admissions))


class OneGroup(SingleProcessExecutor):
    """Appends every block to the first group's table."""

    def submit(self, plan: StepPlan) -> None:
        appends = plan.appends
        if appends is not None:
            appends = appends[appends[:, 1] == 0]
        super().submit(replace(plan, appends=appends))


class NoWindows(SingleProcessExecutor):
    """Does not say that the cache has groups."""

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        return replace(super().start(setup), cache_windows=(None,))


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    made: Any = ExecutorConformance
    checkpoint = made.checkpoint.__wrapped__(SUITE, tmp_path)
    return cast(WorkerSetup, made.setup.__wrapped__(SUITE, checkpoint))


def plugin(executor: type[SingleProcessExecutor]) -> PluginUnderTest:
    spec = ExecutorSpec(name="x", impl=f"{__name__}:{executor.__name__}", contract=4)
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


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        (KnowsByIdentity, "the plan lists none"),
        (KeepsPlans, "token ids of step"),
        (IgnoresEpochs, "token ids of step"),
        (Widens, "dtypes"),
        (Lends, "a result is another one after pickle"),
    ],
)
def test_plans_and_results_that_are_no_data_are_caught(
    executor: type[SingleProcessExecutor], said: str, setup: WorkerSetup
) -> None:
    """They work in one process with one engine, and nowhere else."""
    with pytest.raises((AssertionError, ExecutorError), match=said):
        SUITE.test_results_are_those_of_the_core(plugin(executor), setup)


def test_an_answer_to_the_start_that_is_no_data_is_caught(setup: WorkerSetup) -> None:
    with pytest.raises(AssertionError, match="a WorkerInfo is another one"):
        SUITE.test_started_it_says_what_it_offers(plugin(Lends), setup)
    SUITE.test_started_it_says_what_it_offers(plugin(Right), setup)


@pytest.mark.parametrize("executor", [Mends, IgnoresEpochs])
def test_a_worker_that_serves_an_epoch_whose_rows_it_lacks_is_caught(
    executor: type[SingleProcessExecutor], setup: WorkerSetup
) -> None:
    """Its tokens would be those of other rows."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        SUITE.test_a_plan_without_the_rows_of_its_epoch_is_refused(plugin(executor), setup)
    SUITE.test_a_plan_without_the_rows_of_its_epoch_is_refused(plugin(Right), setup)


@pytest.mark.parametrize("executor", [SamplesAtOnce, SamplesLate, FirstMask, NoEmptyMasks])
def test_masks_that_are_lost_or_late_are_caught(
    executor: type[SingleProcessExecutor], setup: WorkerSetup
) -> None:
    """A row would choose what its grammar forbids."""
    check = SUITE.test_a_step_in_two_parts_chooses_among_the_allowed_ids
    with pytest.raises((AssertionError, ExecutorError), match=r"token ids of step|no step is in"):
        check(plugin(executor), setup)
    check(plugin(Right), setup)


def test_parts_that_are_put_in_order_silently_are_caught(setup: WorkerSetup) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        SUITE.test_parts_out_of_order_are_refused(plugin(MendsMasks), setup)
    SUITE.test_parts_out_of_order_are_refused(plugin(Right), setup)


@pytest.mark.parametrize("executor", [Waits, WaitsForAThread])
def test_waiting_in_submit_is_caught(
    executor: type[SingleProcessExecutor], setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's thread, or for another one."""
    monkeypatch.setattr(suite, "PATIENCE", 0.1)
    with pytest.raises(AssertionError, match="submit waited for the result of a step"):
        SUITE.test_submit_does_not_wait_for_the_step(plugin(executor), setup, monkeypatch)


def test_waiting_in_sample_is_caught(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="sample waited for the result of a step"):
        SUITE.test_submit_does_not_wait_for_the_step(plugin(WaitsInSample), setup, monkeypatch)


def test_a_worker_that_is_out_of_reach_proves_nothing(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.skip.Exception, match="no Worker of this process"):
        SUITE.test_submit_does_not_wait_for_the_step(plugin(Elsewhere), setup, monkeypatch)


@pytest.mark.parametrize(
    ("executor", "said"),
    [(OneTable, "log-probab|token ids"), (OneGroup, "log-probab|token ids"), (NoWindows, "None")],
)
def test_executors_that_know_one_cache_group_are_caught(
    executor: type[SingleProcessExecutor], said: str, setup: WorkerSetup
) -> None:
    """They are right for every model whose layers are alike."""
    with pytest.raises(AssertionError, match=said):
        SUITE.test_each_cache_group_has_block_tables_of_its_own(plugin(executor), setup)


def test_an_executor_that_knows_cache_groups_passes(setup: WorkerSetup) -> None:
    SUITE.test_each_cache_group_has_block_tables_of_its_own(plugin(Right), setup)
