"""The conformance suite of step observers."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm_core.config import EngineConfig
from nanovllm_core.interfaces.observer import ObserverContext, StepObserver, StepRecord
from nanovllm_core.plugin_manager import get_plugin_manager
from nanovllm_core.testing.conformance import PluginUnderTest, SpecConformance


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
            config=EngineConfig.model_validate({"model": "demo"}), plugins=get_plugin_manager()
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
