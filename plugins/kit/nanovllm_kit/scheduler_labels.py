"""Checks of what schedulers and policies read of labels, which are texts that callers wrote.

The names that a plugin looks for are found by watching it; then they carry unexpected texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import RequestView
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.engine_harness import Setting
from nanovllm_kit.scheduler_base import SchedulingConformance
from nanovllm_kit.scheduler_views import a_view, any_labels
from nanovllm_kit.scheduler_watch import ReadOnlyRequest, Watch

COMMON = "tenant"
"""A name that is tried whether the plugin looks for it or not."""


class SchedulerLabels(SchedulingConformance):
    """What holds at both levels."""

    def test_requests_with_any_labels_or_none_are_served(self, plugin: PluginUnderTest) -> None:
        """Any may be missing, and any may hold anything; an error here ends the engine for all."""
        harness = self.harness(plugin, Setting(max_num_seqs=8, prefix_caching=False))
        watch = harness.scheduler
        assert isinstance(watch, Watch)
        for turn in range(3):  # what is found may lead to further names
            for number, labels in enumerate(any_labels({COMMON, *watch.asked_labels})):
                answer = SamplingParams(temperature=0, max_tokens=9)
                harness.add(f"{turn}.{number}", [number % 50] * 8, answer, labels=labels)
            harness.run()
        harness.check_all()


class KeysOfLabels(SpecConformance):
    """What holds of a policy's keys."""

    def _keys(self, plugin: PluginUnderTest) -> list[Callable[[RequestView], tuple[float, ...]]]:
        raise NotImplementedError

    def test_keys_of_any_labels_are_numbers(self, plugin: PluginUnderTest) -> None:
        """No text makes a key NaN, or one that compares with no other."""
        asked: set[str] = set()
        for _ in range(3):
            requests = [
                ReadOnlyRequest(a_view(labels=labels), asked)
                for labels in any_labels({COMMON, *asked})
            ]
            for key in self._keys(plugin):
                values = [tuple(key(request)) for request in requests]
                assert not any(math.isnan(number) for value in values for number in value), values
                sorted(values)
