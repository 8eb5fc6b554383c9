"""Requests carry labels, which schedulers and observers see and nobody changes."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from nanovllm_core.engine.observation import Observation
from nanovllm_core.engine.scheduler import TokenBudgetScheduler
from nanovllm_core.errors import InvalidLabelsError
from nanovllm_core.interfaces.observer import RequestRecord, StepObserver, StepRecord
from nanovllm_core.interfaces.request_labels import (
    MAX_LABELS,
    MAX_NAME_LENGTH,
    MAX_TEXT_LENGTH,
    check_labels,
    labels_of_each,
)
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import RequestView, SchedulingPolicy
from nanovllm_kit.engine_harness import Harness, Letters, Setting
from nanovllm_kit.traffic import Traffic, drive, traffic

TENANT = {"tenant": "acme", "deadline": "2031-01-01"}


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


# -- what labels are


class Name(str):
    """A text that lies about itself."""

    def __str__(self) -> str:
        return "somebody else"


class Kind(enum.StrEnum):
    BATCH = "batch"


def test_labels_are_a_plain_copy_that_nobody_changes() -> None:
    """Neither through the caller's mapping nor through the view; texts are plain `str`."""
    given_labels: dict[str, str] = {"tenant": Name("acme"), Name("kind"): Kind.BATCH}
    labels: Any = check_labels(given_labels)
    given_labels["tenant"] = "other"
    assert labels == {"tenant": "acme", "kind": "batch"}
    assert {type(text) for pair in labels.items() for text in pair} == {str}
    for change in (
        lambda: labels.update(tenant="x"),
        lambda: labels.__setitem__("tenant", "x"),
        lambda: labels.__delitem__("tenant"),
        lambda: labels.setdefault("new", "x"),
        lambda: labels.__ior__({"new": "x"}),
        lambda: labels.pop("tenant"),
        labels.popitem,
        labels.clear,
    ):
        with pytest.raises(TypeError, match="labels are read-only"):
            change()
    assert labels == {"tenant": "acme", "kind": "batch"}


def test_labels_are_written_and_sent_like_any_dict() -> None:
    labels = check_labels(TENANT)
    assert json.loads(json.dumps(labels)) == TENANT
    copies: list[Any] = [copy.deepcopy(labels), pickle.loads(pickle.dumps(labels))]
    for copied in copies:
        assert copied == TENANT
        with pytest.raises(TypeError, match="read-only"):
            copied.clear()


def test_the_largest_labels_are_taken() -> None:
    """In characters, of whatever script; a text may be empty."""
    labels = {f"{i:é<{MAX_NAME_LENGTH}}": "界" * MAX_TEXT_LENGTH for i in range(MAX_LABELS - 1)}
    labels["empty"] = ""
    assert check_labels(labels) == labels
    assert check_labels(None) == check_labels({}) == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["tenant"], r"labels is list \['tenant'\]; it must be a mapping .*\"tenant\": \"acme\""),
        ("tenant=acme", "labels is str 'tenant=acme'; it must be a mapping"),
        ({"n": 5}, r"labels\['n'\] is int 5; it must be text"),
        ({"n": None}, r"labels\['n'\] is NoneType None; it must be text"),
        ({5: "n"}, "a name in labels is int 5; it must be text"),
        ({"": "n"}, r"a name in labels has 0 characters \(''\); give it 1 to 64"),
        ({"n" * 65: ""}, "a name in labels has 65 characters .*; give it 1 to 64"),
        ({"n": "x" * 257}, r"labels\['n'\] has 257 characters .*; give it 0 to 256"),
        ({"n": "\udcff"}, r"labels\['n'\] is '\\udcff', which is no Unicode text"),
        ({"\ud800": "n"}, "a name in labels is .* no Unicode text"),
        (dict.fromkeys(map(str, range(17)), ""), "has 17 entries; a request carries at most 16"),
    ],
)
def test_labels_out_of_bounds_are_refused(wrong: Any, message: str) -> None:
    """With value, limit and remedy; the engine goes on, and the id is free."""
    harness = Harness()
    harness.add("other", [1, 2])
    with pytest.raises(InvalidLabelsError, match=message) as caught:
        harness.add("a", [1, 2], labels=wrong)
    assert len(str(caught.value)) < 400
    harness.add("a", [1, 2])
    harness.run()
    harness.check_all()


def test_a_huge_value_is_not_echoed() -> None:
    for wrong in ({"n": "x" * 10**6}, {"n" * 10**6: "x"}, ["x" * 10**6], {"n": ["x"] * 10**6}):
        with pytest.raises(InvalidLabelsError) as caught:
            check_labels(wrong)
        assert len(str(caught.value)) < 400


def test_one_mapping_is_for_all_prompts_and_a_list_has_one_for_each() -> None:
    assert labels_of_each(None, 2) == [{}, {}]
    assert labels_of_each(TENANT, 2) == [TENANT, TENANT]
    assert labels_of_each([TENANT, None], 2) == [TENANT, None]
    with pytest.raises(InvalidLabelsError, match="3 labels for 2 prompts; give one mapping for al"):
        labels_of_each([{}] * 3, 2)
    with pytest.raises(InvalidLabelsError, match="labels is str 'ab'"):
        labels_of_each("ab", 2)  # type: ignore[arg-type]


# -- who sees them


class Keep(StepObserver):
    """Everything that it is told, in order."""

    def __init__(self) -> None:
        self.told: list[StepRecord | RequestRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.told.append(record)

    def on_request_finished(self, record: RequestRecord) -> None:
        self.told.append(record)

    @property
    def requests(self) -> list[RequestRecord]:
        return [record for record in self.told if isinstance(record, RequestRecord)]

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.told if isinstance(record, StepRecord)]


def observed(
    setting: Setting | None = None, scheduler: TokenBudgetScheduler | None = None
) -> tuple[Harness, Keep]:
    keep = Keep()
    return Harness(setting, scheduler, observation=Observation({"keep": keep})), keep


class ByLabel(SchedulingPolicy):
    """Remembers the labels of each queueing; "urgent" first."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, str]]] = []

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        self.seen.append((request.request_id, request.labels))
        return ("urgent" not in request.labels, request.arrival_index)

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival_index,)


def test_a_policy_sees_the_labels_of_every_sample_also_after_a_preemption() -> None:
    policy = ByLabel()
    setting = Setting(num_blocks=14, prefix_caching=False)
    harness, keep = observed(setting, TokenBudgetScheduler(policy))
    harness.add("a", [1] * 8, greedy(30, n=2), labels=TENANT)
    for name in "bc":
        harness.add(name, [2] * 8, greedy(30), labels={"urgent": ""})
    harness.run()
    harness.check_all()
    expected = {"a": TENANT, "a#1": TENANT, "b": {"urgent": ""}, "c": {"urgent": ""}}
    assert all(labels == expected[name] for name, labels in policy.seen)
    assert len(policy.seen) > len(expected), "nobody was preempted"
    assert [(r.request_id, r.index) for r in keep.requests if r.labels == TENANT] == [
        ("a", 0),
        ("a", 1),
    ]
    assert sum(r.num_preemptions for r in keep.requests) == harness.engine.stats.preemptions > 0


def check_record(record: RequestRecord, harness: Harness) -> None:
    """A record says of its request what the request's output says."""
    output = harness.finished[record.request_id, record.index]
    request = harness.requests[record.request_id, record.index]
    assert record.finish_reason == output.finish_reason
    assert record.num_output_tokens == len(output.token_ids)
    assert record.num_prompt_tokens == len(output.prompt_token_ids)
    assert record.num_cached_tokens == output.num_cached_tokens
    assert record.labels == request.labels
    assert (record.first_scheduled_time is None) == (output.wait_steps is None)
    assert (record.first_token_time is None) == (not output.token_ids)
    times = [
        record.arrival_time,
        record.first_scheduled_time,
        record.first_token_time,
        record.finished_time,
    ]
    known = [time for time in times if time is not None]
    assert all(earlier <= later for earlier, later in pairwise(known)), times


@given(case=traffic())
@settings(max_examples=60, deadline=None)
def test_every_request_has_one_record_that_agrees_with_its_output(case: Traffic) -> None:
    """Whatever arrives, is aborted or preempted, at any depth; the sums are those of the steps."""
    harness, keep = observed(case.setting)
    drive(harness, case.arrivals)
    ids = [(record.request_id, record.index) for record in keep.requests]
    assert len(ids) == len(set(ids)), "two records of one request"
    assert set(ids) == harness.finished.keys()
    for record in keep.requests:
        check_record(record, harness)
    stats = harness.engine.stats
    assert len(ids) == stats.finished
    assert sum(record.num_output_tokens for record in keep.requests) == stats.output_tokens
    assert sum(record.num_preemptions for record in keep.requests) == stats.preemptions


def test_a_record_comes_before_the_step_that_ended_the_request() -> None:
    """So an observer that writes once a step has all that ended in it."""
    harness, keep = observed(Setting(steps_ahead=0))
    harness.add("one", [1, 2], greedy(1))
    harness.add("two", [1, 2], greedy(2))
    harness.run()
    assert [getattr(record, "request_id", "step") for record in keep.told] == [
        "one",
        "step",
        "two",
        "step",
    ]
    [first, second] = keep.requests
    assert first.first_token_time == first.finished_time == second.first_token_time
    assert second.finished_time > first.finished_time
    assert [step.num_finished for step in keep.steps] == [1, 1]


def test_an_abort_is_recorded_at_once_with_what_was_reached() -> None:
    """Before any step, in the queue, and with tokens that nobody has been given yet."""
    harness, keep = observed(Setting(max_num_seqs=1))
    harness.add("runs", [1, 2], greedy(30), labels=TENANT)
    harness.add("waits", [1, 2], greedy(30, n=2))
    harness.engine.abort("waits")
    assert [(r.request_id, r.index) for r in keep.requests] == [("waits", 0), ("waits", 1)]
    assert {r.first_scheduled_time for r in keep.requests} == {None}
    for _ in range(5):
        harness.step()
    harness.engine.abort("runs")
    record = keep.requests[-1]
    assert (record.request_id, record.finish_reason, record.labels) == ("runs", "abort", TENANT)
    assert record.num_output_tokens > 0
    harness.run()
    assert len(keep.requests) == 3, "an abort was told of twice"
    for record in keep.requests:
        check_record(record, harness)


@pytest.mark.parametrize(
    ("params", "reason"),
    [(greedy(3), "length"), (greedy(9, stop_token_ids=range(50)), "stop"), (greedy(stop="a"), "")],
)
def test_the_reason_is_the_output_s(params: SamplingParams, reason: str) -> None:
    harness, keep = observed()
    harness.add("a", [5, 6, 7], params, detokenizer=Letters)
    harness.run()
    [record] = keep.requests
    check_record(record, harness)
    assert not reason or record.finish_reason == reason


def test_a_record_can_be_written_as_json_and_not_be_changed() -> None:
    harness, keep = observed()
    harness.add("a", [5, 6, 7], labels=TENANT)
    harness.run()
    [record] = keep.requests
    assert json.loads(json.dumps(asdict(record)))["labels"] == TENANT
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(AttributeError):
        record.labels = {}  # type: ignore[misc]


# -- who does not


class Steps(StepObserver):
    """Written before there were records of requests."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps += 1


class Raises(Keep):
    def on_request_finished(self, record: RequestRecord) -> None:
        super().on_request_finished(record)
        raise KeyError("tenant")


def test_no_record_is_made_where_no_observer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer of steps alone goes on as before."""
    monkeypatch.setattr("nanovllm_core.engine.observation.RequestRecord", None)
    steps = Steps()
    harness = Harness(observation=Observation({"steps": steps}))
    harness.add("a", [5, 6, 7], labels=TENANT)
    harness.run()
    assert steps.steps == harness.engine.stats.steps


@pytest.mark.parametrize("order", [("raises", "keep", "steps"), ("keep", "steps", "raises")])
def test_an_observer_that_raises_at_a_record_hears_no_more(
    order: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine and the others go on."""
    observers = {"raises": Raises(), "keep": Keep(), "steps": Steps()}
    harness = Harness(observation=Observation({name: observers[name] for name in order}))
    for name in "abc":
        harness.add(name, [5, 6, 7])
    harness.run()
    harness.check_all()
    raises, keep, steps = observers.values()
    assert isinstance(raises, Raises)
    assert isinstance(keep, Keep)
    assert isinstance(steps, Steps)
    assert len(raises.requests) == 1
    assert len(keep.requests) == 3
    assert len(raises.steps) < len(keep.steps) == steps.steps
    assert "raises raised; it is closed and hears no more" in caplog.text


def test_a_view_of_a_request_that_is_over_says_so() -> None:
    """No row and so nothing scheduled, and all its tokens: a scheduler may settle accounts by it.

    It keeps the views of those that run, and nobody tells it when one ends.
    """
    harness = Harness()
    for name, aborted in (("ends", False), ("gone", True)):
        [request] = harness.add(name, [5, 6, 7], greedy(9))
        for _ in range(3):
            harness.step()
        assert request.num_scheduled > 3
        if aborted:
            harness.engine.abort(name)
        harness.run()
        output = harness.finished[name, 0]
        assert request.num_scheduled == 0
        assert request.num_tokens == 3 + len(output.token_ids)
        assert (output.finish_reason == "abort") == aborted
