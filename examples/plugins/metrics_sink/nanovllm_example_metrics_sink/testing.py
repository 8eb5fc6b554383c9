"""The suite that every metrics sink must pass; `nanovllm plugins test NAME` runs it.

class TestMySink(MetricsSinkConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm_example_metrics_sink.interface import Metrics, MetricsSink, MetricsSinkSpec
from nanovllm_kit import PluginUnderTest, SpecConformance
from nanovllm_kit.observer import IN_THE_QUEUE, request_record

SOME = Metrics(
    last_step=100,
    steps=100,
    seconds=0.75,
    decoded_rows=1600,
    prefill_tokens=512,
    output_tokens=1616,
    finished=3,
    preempted=1,
    running=16,
    waiting=4,
    free_blocks=900,
    num_blocks=1024,
)
NOTHING = Metrics(
    last_step=1,
    steps=1,
    seconds=0.0,
    decoded_rows=0,
    prefill_tokens=0,
    output_tokens=0,
    finished=0,
    preempted=0,
    running=0,
    waiting=0,
    free_blocks=0,
    num_blocks=1,
)
MANY = 1000
AT_MOST_S = 0.002
"""What a window may cost on average: steps wait for it."""


class MetricsSinkConformance(SpecConformance):
    """What every sink holds. Relative paths of its options are in a folder of the test's own."""

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def sink(self, plugin: PluginUnderTest) -> Iterator[MetricsSink]:
        """A sink with the options under test; closed at the end."""
        made: MetricsSink = plugin.load()(plugin.options)
        yield made
        made.close()

    def test_the_spec_names_a_sink(self, plugin: PluginUnderTest) -> None:
        """`impl` is a `MetricsSink` class, in a `MetricsSinkSpec`."""
        assert isinstance(plugin.spec, MetricsSinkSpec)
        assert issubclass(plugin.load(), MetricsSink)

    @pytest.mark.parametrize("metrics", [SOME, NOTHING], ids=["some", "nothing"])
    def test_a_window_is_taken(self, sink: MetricsSink, metrics: Metrics) -> None:
        """Also one in which nothing happened, in no time."""
        sink.write(metrics)

    def test_windows_come_one_after_another_and_take_no_time(self, sink: MetricsSink) -> None:
        """A thousand of them: the steps of the engine wait for each."""
        started = time.perf_counter()
        for number in range(1, MANY + 1):
            sink.write(replace(SOME, last_step=100 * number))
        assert time.perf_counter() - started < MANY * AT_MOST_S

    @pytest.mark.parametrize("changes", [{}, IN_THE_QUEUE], ids=["ended", "aborted"])
    def test_a_request_is_taken(self, sink: MetricsSink, changes: dict[str, object]) -> None:
        """Among windows; one that was aborted in the queue has neither tokens nor most times."""
        labels = {"tenant": "é", "note": "\0\n"}
        sink.write_request(request_record("1", labels=labels, **changes))
        sink.write(SOME)
        sink.write_request(request_record("2", **changes))

    def test_closing_twice_is_fine(self, sink: MetricsSink) -> None:
        """With and without anything written."""
        sink.write(SOME)
        sink.close()
        sink.close()

    def test_a_second_sink_goes_on_where_the_first_was_closed(
        self, plugin: PluginUnderTest
    ) -> None:
        """One process may open several engines after each other, with the same options."""
        for _ in range(2):
            sink: MetricsSink = plugin.load()(plugin.options)
            sink.write(SOME)
            sink.close()
