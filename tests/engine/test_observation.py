"""What a record says of time, counted with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm_core.engine import observation
from nanovllm_core.engine.observation import Observation
from nanovllm_core.interfaces.observer import RequestRecord, StepObserver, StepRecord
from nanovllm_kit.engine_harness import Harness


class Keep(StepObserver):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


def test_seconds_run_from_the_step_before_or_from_the_call_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = Keep()
    made = Observation({"keep": keep})
    harness = Harness()
    harness.add("a", [1, 2, 3])
    harness.engine._submit_ahead()
    planned = harness.engine._in_flight[0]
    stats = harness.engine.stats
    # (the call began, the step was taken in, steps in flight behind it)
    calls = ((10.0, 11.0, 1), (11.5, 13.0, 1), (13.5, 14.0, 0), (90.0, 92.0, 0), (95.0, 96.0, 1))
    for began, now, in_flight in calls:
        monkeypatch.setattr(observation, "perf_counter", lambda now=now: now)
        stats = replace(
            stats,
            output_tokens=stats.output_tokens + 2,
            finished=stats.finished + 3,
            preemptions=stats.preemptions + 4,
        )
        made.observe(stats, planned, in_flight, began)
    # The step in flight is of a request that has ended: it is collected with the next one's.
    monkeypatch.setattr(observation, "perf_counter", lambda: 97.0)
    made.observe(replace(stats, running=0, waiting=0), planned, 1, 96.5)
    monkeypatch.setattr(observation, "perf_counter", lambda: 200.0)
    made.observe(stats, planned, 1, 199.0)
    assert [record.step for record in keep.records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record.seconds for record in keep.records] == [1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    assert [record.num_output_tokens for record in keep.records] == [2, 2, 2, 2, 2, 0, 0]
    assert [record.num_finished for record in keep.records] == [3, 3, 3, 3, 3, 0, 0]
    assert [record.num_preempted for record in keep.records] == [4, 4, 4, 4, 4, 0, 0]
    assert [record.num_in_flight for record in keep.records] == [1, 1, 0, 0, 1, 1, 1]
    assert [record.num_prefill_tokens for record in keep.records] == [3] * 7


class Fails(StepObserver):
    """Wants the records of requests, and raises at its first step."""

    def __init__(self) -> None: ...

    def on_step(self, record: StepRecord) -> None:
        raise ValueError("not today")

    def on_request_finished(self, record: RequestRecord) -> None:
        pytest.fail("it was dropped")


def test_no_record_of_a_request_is_made_where_the_observer_that_wants_it_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observation, "RequestRecord", lambda **_: pytest.fail("nobody reads it"))
    harness = Harness(observation=Observation({"fails": Fails(), "keep": Keep()}))
    harness.add("a", [1, 2, 3])
    harness.run()


def test_every_observer_is_closed_once_whatever_the_others_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []

    class Closes(Keep):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            raise ValueError(f"{self.name} is not today")

    made = Observation({name: Closes(name) for name in ("one", "other")})
    made.close()
    made.close()
    assert sorted(closed) == ["one", "other"]
    assert "one is not today" in caplog.text
