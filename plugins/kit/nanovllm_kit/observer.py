"""The conformance suite of step observers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import Observation
from nanovllm_core.interfaces.observer import (
    ObserverContext,
    RequestRecord,
    StepObserver,
    StepRecord,
)
from nanovllm_core.interfaces.request_labels import check_labels
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.enabled import enabled_plugins
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.scheduler_views import any_labels
from nanovllm_kit.scheduler_watch import AskedLabels


def step_record(step: int, **changes: int | float) -> StepRecord:
    """A step in which two rows got a token each, with changes."""
    values: dict[str, int | float] = {
        "seconds": 0.01,
        "num_decode_rows": 2,
        "num_prefill_tokens": 0,
        "num_output_tokens": 2,
        "num_finished": 0,
        "num_preempted": 0,
        "num_running": 2,
        "num_waiting": 0,
        "num_in_flight": 1,
        "num_free_blocks": 7,
        "num_blocks": 8,
    }
    return StepRecord(step=step, **{**values, **changes})  # type: ignore[arg-type]


def request_record(request_id: str, **changes: Any) -> RequestRecord:
    """A request that wrote five tokens in a second, with changes."""
    values: dict[str, Any] = {
        "index": 0,
        "labels": check_labels(None),
        "finish_reason": "length",
        "num_prompt_tokens": 9,
        "num_cached_tokens": 0,
        "num_output_tokens": 5,
        "num_preemptions": 0,
        "arrival_time": 100.0,
        "first_scheduled_time": 100.25,
        "first_token_time": 100.5,
        "finished_time": 101.0,
    }
    return RequestRecord(request_id=request_id, **{**values, **changes})


IN_THE_QUEUE: dict[str, Any] = {
    "finish_reason": "abort",
    "num_output_tokens": 0,
    "first_scheduled_time": None,
    "first_token_time": None,
}
"""Of a request that was aborted before it was admitted."""


class _Told(StepObserver):
    """Everything that an engine tells, in order."""

    def __init__(self) -> None:
        self.records: list[StepRecord | RequestRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def told_by_an_engine() -> list[StepRecord | RequestRecord]:
    """The records of a run with samples, labels, preemptions, a stop and aborts."""
    told = _Told()
    setting = Setting(num_blocks=14, prefix_caching=False, eos_token_ids=(3, 17, 40))
    harness = Harness(setting, observation=Observation({"told": told}))
    harness.add("early", [1] * 8)
    harness.engine.abort("early")
    answer = SamplingParams(temperature=0, max_tokens=30, n=2)
    for number, labels in enumerate(({}, {"tenant": "a"}, {"unheard of": "é"})):
        harness.add(f"r{number}", [number + 1] * 8, answer, labels=labels)
        harness.step()
    harness.engine.abort("r1")
    harness.add("short", [9] * 8, SamplingParams(temperature=0, max_tokens=1))
    harness.run()
    return told.records


class ObserverConformance(SpecConformance):
    """It takes whatever steps come, in a folder of its own, and is closed once."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What an observer writes by default does not stay."""
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def context(self) -> ObserverContext:
        """What the engine tells an observer; the plugins are those of this environment."""
        return ObserverContext(
            config=EngineConfig.model_validate({"model": "demo"}), plugins=enabled_plugins()
        )

    def make(self, plugin: PluginUnderTest, context: ObserverContext) -> StepObserver:
        """A fresh observer."""
        observer = plugin.load()(plugin.options, context)
        assert isinstance(observer, StepObserver)
        return observer

    @pytest.mark.parametrize("steps", [0, 1, 300])
    def test_any_number_of_steps_is_taken(
        self, plugin: PluginUnderTest, context: ObserverContext, steps: int
    ) -> None:
        """Also none, where the engine is closed at once or its start failed."""
        observer = self.make(plugin, context)
        for step in range(1, steps + 1):
            observer.on_step(step_record(step))
        observer.close()

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_decode_rows": 0, "num_prefill_tokens": 512, "num_output_tokens": 0},
            {"num_decode_rows": 0, "num_output_tokens": 0, "num_running": 0, "num_waiting": 0},
            {"seconds": 0.0, "num_in_flight": 0},
            {"seconds": 3600.0, "num_finished": 256, "num_preempted": 5},
            {"num_free_blocks": 0, "num_waiting": 10**6},
        ],
        ids=["a prompt", "nothing came of it", "no time", "a pause", "a full cache"],
    )
    def test_a_step_out_of_the_ordinary_is_taken(
        self, plugin: PluginUnderTest, context: ObserverContext, changes: dict[str, int | float]
    ) -> None:
        """An observer that raises is closed and hears no more."""
        observer = self.make(plugin, context)
        observer.on_step(step_record(1))
        observer.on_step(step_record(2, **changes))
        observer.close()

    def test_what_an_engine_tells_is_taken(
        self, plugin: PluginUnderTest, context: ObserverContext
    ) -> None:
        """Steps and requests in their order: one is aborted before the first step."""
        observer = self.make(plugin, context)
        for record in told_by_an_engine():
            _tell(observer, record)
        observer.close()

    @pytest.mark.parametrize("requests", [1, 300])
    def test_any_number_of_requests_is_taken(
        self, plugin: PluginUnderTest, context: ObserverContext, requests: int
    ) -> None:
        """Also without a step: all may be aborted before there is one. Ids come again."""
        observer = self.make(plugin, context)
        for number in range(requests):
            observer.on_request_finished(request_record(str(number // 3), index=number % 2))
        observer.close()

    @pytest.mark.parametrize(
        "changes",
        [
            IN_THE_QUEUE,
            {**IN_THE_QUEUE, "first_scheduled_time": 100.25, "num_preemptions": 40},
            {"num_output_tokens": 1, "first_token_time": 101.0},
            {"num_prompt_tokens": 10**6, "num_cached_tokens": 10**6 - 1, "finish_reason": "stop"},
            {name: 0.0 for name in vars(RequestRecord) if name.endswith("_time")},
        ],
        ids=["never admitted", "no token", "one token", "a cached prompt", "no time"],
    )
    def test_a_request_out_of_the_ordinary_is_taken(
        self, plugin: PluginUnderTest, context: ObserverContext, changes: dict[str, Any]
    ) -> None:
        """Times may be None or equal, and counts 0."""
        observer = self.make(plugin, context)
        for number in range(3):
            observer.on_request_finished(request_record(f"strange {number}", **changes))
            observer.on_step(step_record(number + 1, num_finished=1))
        observer.close()

    def test_any_labels_or_none_are_taken(
        self, plugin: PluginUnderTest, context: ObserverContext
    ) -> None:
        """A label is text that a caller wrote: any may be missing, and any may hold anything."""
        asked: set[str] = set()
        for _ in range(2):  # the first finds the names that are looked for
            finder, observer = self.make(plugin, context), self.make(plugin, context)
            for number, labels in enumerate(any_labels({"tenant", *asked})):
                with suppress(Exception):  # these labels are no dict, as the engine's are
                    record = request_record("finds", labels=AskedLabels(labels, asked))
                    finder.on_request_finished(record)
                observer.on_request_finished(
                    request_record(str(number), labels=check_labels(labels))
                )
                observer.on_step(step_record(number + 1, num_finished=1))
            with suppress(Exception):
                finder.close()
            observer.close()

    def test_two_engines_have_observers_of_their_own(
        self, plugin: PluginUnderTest, context: ObserverContext
    ) -> None:
        """Closing one does not close the other."""
        first, second = self.make(plugin, context), self.make(plugin, context)
        assert first is not second
        first.on_step(step_record(1))
        first.close()
        second.on_step(step_record(1))
        second.close()


def _tell(observer: StepObserver, record: StepRecord | RequestRecord) -> None:
    if isinstance(record, StepRecord):
        observer.on_step(record)
    else:
        observer.on_request_finished(record)
