"""The suite that every plugin of the kind `my_plugin` passes.

`nanovllm plugins test NAME` runs it on an installed plugin; an author inherits it:

    class TestMine(MyPluginConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)
"""

from __future__ import annotations

from pathlib import Path

import pytest
from nanovllm_core.api import StepRecord
from nanovllm_kit import PluginUnderTest, SpecConformance

from nanovllm_kind_my_plugin.spec import StepSink, StepSinkSpec


def a_record(step: int) -> StepRecord:
    """A step in which two rows got a token each."""
    return StepRecord(
        step=step,
        seconds=0.25,
        num_decode_rows=2,
        num_prefill_tokens=0,
        num_output_tokens=2,
        num_finished=0,
        num_preempted=0,
        num_running=2,
        num_waiting=0,
        num_in_flight=1,
        num_free_blocks=7,
        num_blocks=8,
    )


class MyPluginConformance(SpecConformance):
    """What every plugin of this kind must hold."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a plugin writes by default does not stay."""
        monkeypatch.chdir(tmp_path)

    def test_the_unit_is_one_of_two(self, plugin: PluginUnderTest) -> None:
        """Seconds or milliseconds, so that a reader knows the unit."""
        assert isinstance(plugin.spec, StepSinkSpec)
        assert plugin.spec.unit in ("s", "ms")

    def test_it_takes_steps_and_is_closed(self, plugin: PluginUnderTest) -> None:
        """Made from its options alone; it takes any number of steps, none too."""
        for steps in (0, 1, 100):
            made = plugin.load()(plugin.options)
            assert isinstance(made, StepSink)
            for step in range(1, steps + 1):
                made.write(a_record(step))
            made.close()
