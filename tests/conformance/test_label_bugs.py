"""Bugs in reading labels are planted in schedulers and observers, and the suites find each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from random import Random
from typing import Any

import pytest

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import PluginFailedError, SchedulerError
from nanovllm_core.interfaces.observer import (
    ObserverContext,
    RequestRecord,
    StepObserver,
    StepRecord,
)
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_core.interfaces.specs import NoOptions, ObserverSpec, SchedulerSpec
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_kit import (
    ObserverConformance,
    PluginUnderTest,
    SchedulerConformance,
    SchedulingPolicyConformance,
)
from nanovllm_kit.observer import IN_THE_QUEUE, told_by_an_engine


class ByLabel(SchedulingPolicy):
    """First come, first served, but for what a label says."""

    def __init__(self, options: NoOptions) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (self.read(request), request.arrival_index)

    def read(self, request: RequestView) -> float:
        raise NotImplementedError


class Needs(ByLabel):
    """Assumes that the label is there."""

    def read(self, request: RequestView) -> float:
        return len(request.labels["tenant"])


class Known(ByLabel):
    """Assumes that the tenant is one that it knows."""

    def read(self, request: RequestView) -> float:
        return {"": 0, "a": 1, "b": 2}[request.labels.get("tenant", "")]


class Parses(ByLabel):
    """Assumes that a label under a name of its own is a number."""

    def read(self, request: RequestView) -> float:
        return float(request.labels.get("nanovllm.example/sla", "0"))


class NotANumber(ByLabel):
    """Refuses what is no float, and forgets that NaN is one."""

    def read(self, request: RequestView) -> float:
        try:
            return float(request.labels.get("deadline", "0"))
        except ValueError:
            return math.inf


class SecondName(ByLabel):
    """Looks for a second name only where the first was found."""

    def read(self, request: RequestView) -> float:
        return int(request.labels.get("plan", "0")) if "tenant" in request.labels else 0


class ServesTenants(TokenBudgetScheduler):
    """Requests of no tenant wait for ever."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        tenants = [r.request_id for r in (*state.waiting, *state.prefilling) if r.labels]
        return [share for share in super().schedule(state) if share.request_id in tenants]


def check(policy: type[object], level: str, name: str) -> None:
    spec = SchedulerSpec(name="wrong", impl=f"{__name__}:{policy.__name__}", contract=1)
    suite: SchedulingPolicyConformance | SchedulerConformance = SchedulingPolicyConformance()
    if level == "scheduler":
        spec, suite = replace(spec, level="scheduler"), SchedulerConformance()
    case = getattr(suite, name)
    more = {"draws": Random(name)} if "draws" in signature(case).parameters else {}
    case(PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins"), **more)


SERVED = "test_requests_with_any_labels_or_none_are_served"
KEYS = "test_keys_of_any_labels_are_numbers"
ENDS = "test_every_request_ends_with_the_tokens_that_its_ids_decide"


@pytest.mark.parametrize(
    ("wrong", "level", "name", "error"),
    [
        (Needs, "policy", SERVED, PluginFailedError),
        (Needs, "policy", KEYS, KeyError),
        (Needs, "policy", ENDS, PluginFailedError),
        (Known, "policy", SERVED, PluginFailedError),
        (Parses, "policy", SERVED, PluginFailedError),
        (Parses, "policy", KEYS, ValueError),
        (NotANumber, "policy", KEYS, AssertionError),
        (SecondName, "policy", SERVED, PluginFailedError),
        (ServesTenants, "scheduler", SERVED, SchedulerError),
    ],
)
def test_a_scheduler_that_misreads_labels_fails(
    wrong: type[Scheduler | SchedulingPolicy], level: str, name: str, error: type[Exception]
) -> None:
    """Missing, unknown, under a name of the plugin's own, or no number."""
    with pytest.raises(error):
        check(wrong, level, name)


class Observes(StepObserver):
    """Right in everything but what a subclass does with a request."""

    def __init__(self, options: NoOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.step: StepRecord | None = None
        self.seen: set[object] = set()

    def on_step(self, record: StepRecord) -> None:
        self.step = record


class ObserverNeeds(Observes):
    def on_request_finished(self, record: RequestRecord) -> None:
        self.seen.add(record.labels["tenant"])


class ObserverParses(Observes):
    def on_request_finished(self, record: RequestRecord) -> None:
        self.seen.add(float(record.labels.get("nanovllm.example/sla", "0")))


class WritesAscii(Observes):
    def on_request_finished(self, record: RequestRecord) -> None:
        self.seen.add(record.labels.get("user", "").encode("ascii"))


class Times(Observes):
    """Every request has a first token."""

    def on_request_finished(self, record: RequestRecord) -> None:
        assert record.first_token_time is not None
        self.seen.add(record.first_token_time - record.arrival_time)


class Waits(Observes):
    """Every request has been admitted."""

    def on_request_finished(self, record: RequestRecord) -> None:
        assert record.first_scheduled_time is not None
        self.seen.add(record.first_scheduled_time)


class Rates(Observes):
    """Every request took some time after its first token."""

    def on_request_finished(self, record: RequestRecord) -> None:
        if record.first_token_time is not None:
            seconds = record.finished_time - record.first_token_time
            self.seen.add((record.num_output_tokens - 1) / seconds)


class Once(Observes):
    """Every id has one sample."""

    def on_request_finished(self, record: RequestRecord) -> None:
        assert record.request_id not in self.seen
        self.seen.add(record.request_id)


class StepFirst(Observes):
    """A step comes before every request."""

    def on_request_finished(self, record: RequestRecord) -> None:
        assert self.step is not None
        self.seen.add(self.step.step)


LABELS = "test_any_labels_or_none_are_taken"
STRANGE = "test_a_request_out_of_the_ordinary_is_taken"


@pytest.mark.parametrize(
    ("wrong", "name", "changes", "error"),
    [
        (ObserverNeeds, LABELS, (), KeyError),
        (ObserverNeeds, "test_what_an_engine_tells_is_taken", (), KeyError),
        (ObserverParses, LABELS, (), ValueError),
        (WritesAscii, LABELS, (), UnicodeEncodeError),
        (Times, STRANGE, (IN_THE_QUEUE,), AssertionError),
        (Times, "test_what_an_engine_tells_is_taken", (), AssertionError),
        (Waits, "test_what_an_engine_tells_is_taken", (), AssertionError),
        (Rates, "test_what_an_engine_tells_is_taken", (), ZeroDivisionError),
        (Once, "test_what_an_engine_tells_is_taken", (), AssertionError),
        (StepFirst, "test_what_an_engine_tells_is_taken", (), AssertionError),
        (StepFirst, "test_any_number_of_requests_is_taken", (1,), AssertionError),
    ],
)
def test_an_observer_that_misreads_a_record_fails(
    wrong: type[StepObserver], name: str, changes: tuple[Any, ...], error: type[Exception]
) -> None:
    """Labels, times and ids of requests that no author thinks of first."""
    spec = ObserverSpec(name="wrong", impl=f"{__name__}:{wrong.__name__}", contract=1)
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    config = EngineConfig.model_validate({"model": "demo"})
    context = ObserverContext(config=config, plugins=get_plugin_manager())
    with pytest.raises(error):
        getattr(ObserverConformance(), name)(plugin, context, *changes)


def test_the_run_that_observers_are_told_of_has_every_kind_of_request() -> None:
    """Aborted in the queue and later, preempted, stopped, of one token, with and without labels."""
    requests = [r for r in told_by_an_engine() if isinstance(r, RequestRecord)]
    assert {r.finish_reason for r in requests} == {"abort", "length", "stop"}
    assert {r.first_scheduled_time is None for r in requests} == {True, False}
    assert {bool(r.num_preemptions) for r in requests} == {True, False}
    assert {r.index for r in requests} == {0, 1}
    assert {bool(r.labels) for r in requests} == {True, False}
    assert 1 in {r.num_output_tokens for r in requests}
