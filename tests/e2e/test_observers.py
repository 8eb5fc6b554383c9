"""Observers are told of every step, and harm nobody."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.errors import CheckpointError, InvalidLabelsError, PluginLoadError
from nanovllm_core.worker.executor import SingleProcessExecutor

from .tiny import open_tiny

Install = Callable[..., None]
GROUP = "nanovllm.observers"
PROMPT = [5, 17, 3, 60]

SOURCE = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import ObserverSpec, StepObserver, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    label: str = ""

class Keep(StepObserver):
    made = []

    def __init__(self, options, context):
        super().__init__(options, context)
        self.records, self.closed = [], 0
        Keep.made.append(self)

    def on_step(self, record):
        self.records.append(record)

    def close(self):
        self.closed += 1

class Requests(Keep):
    def on_request_finished(self, record):
        self.records.append(record)

    def on_step(self, record):
        pass

class Fails(Keep):
    def on_step(self, record):
        super().on_step(record)
        if record.step == 2:
            raise OSError("disk full")

    def close(self):
        super().close()
        raise OSError("still full")

class Unmade(Keep):
    def __init__(self, options, context):
        raise OSError("no such folder")

class Exits(Keep):
    def close(self):
        super().close()
        raise SystemExit(3)

@hookimpl
def nanovllm_observers():
    return [
        ObserverSpec(name=name.lower(), impl=__name__ + ":" + name, contract=1, options=Options)
        for name in ("Keep", "Requests", "Fails", "Unmade", "Exits")
    ]
"""


@pytest.fixture
def made(install: Install) -> Callable[[], list[Any]]:
    """The observers that were made, once something has loaded them."""
    entries = dict.fromkeys(("keep", "requests", "fails", "unmade", "exits"), "watchers")
    install("nanovllm-watchers", {GROUP: entries}, {"watchers": SOURCE})
    return lambda: sys.modules["watchers"].Keep.made


def run(llm: LLM, *lengths: int) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.generate([PROMPT] * len(lengths), params)


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_the_records_add_up_to_what_was_done(
    made: Callable[[], list[Any]], tiny: Path, steps_ahead: int
) -> None:
    """At any depth: every prompt token, every output token and every request is in one record."""
    options = {"cache.prefix_caching": False, "steps_ahead": steps_ahead}
    with open_tiny(tiny, observers=["keep"], **options) as llm:
        run(llm, 3, 6)
        run(llm, 2)
        [observer] = made()
        records, stats = observer.records, llm.stats
    assert [record.step for record in records] == [*range(1, len(records) + 1)]
    assert sum(record.num_prefill_tokens for record in records) == 3 * len(PROMPT)
    assert sum(record.num_output_tokens for record in records) == 3 + 6 + 2
    assert sum(record.num_finished for record in records) == 3
    assert max(record.num_decode_rows for record in records) == 2
    assert max(record.num_running for record in records) == 2
    assert {record.num_blocks for record in records} == {stats.blocks}
    assert all(0 <= record.num_free_blocks <= record.num_blocks for record in records)
    assert max(record.num_in_flight for record in records) == steps_ahead
    assert all(record.seconds > 0 for record in records)


def test_the_records_of_requests_carry_what_the_caller_said(
    made: Callable[[], list[Any]], tiny: Path
) -> None:
    """One mapping for all prompts or one for each, and a stream that is left early.

    A batch with a wrong one has none.
    """
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=2)
    acme, other = {"tenant": "acme"}, {"tenant": "other", "deadline": "soon"}
    with open_tiny(tiny, observers=["requests"]) as llm:
        began = perf_counter()
        llm.generate([PROMPT] * 2, params, labels=acme)
        llm.generate([PROMPT] * 3, params, labels=[other, None, acme])
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=300), labels=other)
        next(stream)
        stream.close()
        assert llm.stats.running == 0
        ended = perf_counter()
        [observer] = made()
        for wrong, told in (
            ([acme, {"tenant": 5}], r"^prompts\[1\]: labels\['tenant'\] is int 5; it must be"),
            ([acme], "^1 labels for 2 prompts; give one"),
            ({"tenant": 5}, r"^labels\['tenant'\] is int 5"),
        ):
            with pytest.raises(InvalidLabelsError, match=told):
                llm.generate([PROMPT] * 2, params, labels=wrong)
    records = [record for record in observer.records if record.finish_reason != "abort"]
    told_of = sorted((r.request_id, r.index) for r in records)
    assert told_of == [(str(request), index) for request in range(5) for index in range(2)]
    said = (acme, acme, other, {}, acme)
    assert all(r.labels == said[int(r.request_id)] for r in records)
    assert {r.num_output_tokens for r in records} == {4}
    assert all(began < r.arrival_time < r.first_token_time < r.finished_time for r in records)
    [left] = [record for record in observer.records if record not in records]
    assert left.labels == other
    assert 1 <= left.num_output_tokens < 300
    assert left.finished_time < ended


def test_preempted_requests_are_counted(made: Callable[[], list[Any]], tiny: Path) -> None:
    cache = {"cache.num_blocks": 20, "cache.block_size": 16}
    with open_tiny(tiny, observers=["keep"], max_num_seqs=4, **cache) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate([[i + 1] * 60 for i in range(4)], params)
        assert sum(r.num_preempted for r in made()[0].records) == llm.stats.preemptions > 0
        assert max(r.num_waiting for r in made()[0].records) > 0


def test_an_observer_may_make_further_plugins_and_read_the_configuration(
    made: Callable[[], list[Any]], tiny: Path
) -> None:
    with open_tiny(tiny, observers=[{"name": "keep", "options": {"label": "a"}}]) as llm:
        [observer] = made()
        context = observer.context
        assert context.config is llm.config
        policy = context.plugins.make(context.plugins.resolve("scheduler", "fcfs"))
        assert type(policy).__name__ == "FcfsPolicy"
        assert observer.options.label == "a"


def test_one_that_raises_is_reported_and_closed_and_the_engine_goes_on(
    made: Callable[[], list[Any]], tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), open_tiny(tiny, observers=["fails", "keep"]) as llm:
        run(llm, 8)
        fails, keeps = made()
        assert (len(fails.records), fails.closed) == (2, 1)
        assert len(keeps.records) > 2
    assert (fails.closed, keeps.closed) == (1, 1)
    told = caplog.text
    assert "observers[0]: observer 'fails' (nanovllm-watchers 1.2.3) raised" in told
    assert "disk full" in told
    assert "still full" in told


def test_closing_twice_closes_an_observer_once(made: Callable[[], list[Any]], tiny: Path) -> None:
    llm = open_tiny(tiny, observers=["keep", "keep"])
    llm.close()
    llm.close()
    assert [observer.closed for observer in made()] == [1, 1]


def test_an_observer_that_exits_while_it_is_closed_keeps_no_other_open(
    made: Callable[[], list[Any]], tiny: Path
) -> None:
    """The exit goes on once the others are closed."""
    llm = open_tiny(tiny, observers=["keep", "exits", "keep"])
    with pytest.raises(SystemExit):
        llm.close()
    assert [observer.closed for observer in made()] == [1, 1, 1]


def test_where_the_start_fails_the_observers_are_closed(
    made: Callable[[], list[Any]], tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(PluginLoadError, match=r"observer 'unmade' \(nanovllm-watchers 1\.2\.3\)"):
        open_tiny(tiny, observers=["keep", "unmade"])
    assert [observer.closed for observer in made()] == [1]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(CheckpointError):
        open_tiny(empty, observers=["keep"])
    assert [observer.closed for observer in made()] == [1, 1]


def test_an_executor_that_cannot_be_closed_keeps_no_observer_open(
    made: Callable[[], list[Any]], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: SingleProcessExecutor) -> None:
        raise RuntimeError("the device is gone")

    llm = open_tiny(tiny, observers=["keep"])
    monkeypatch.setattr(SingleProcessExecutor, "close", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.close()
    assert [observer.closed for observer in made()] == [1]
