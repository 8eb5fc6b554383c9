"""The suite that every whole scheduler passes."""

from __future__ import annotations

import pytest

from nanovllm_example_scheduler_priority.plugin import SPEC
from nanovllm_kit import PluginUnderTest, SchedulerConformance, plugin_under_test


class TestPriority(SchedulerConformance):
    """In the order of arrival, and with classes that age soon enough for the suite to see it."""

    @pytest.fixture(
        params=[pytest.param(0, marks=pytest.mark.slow), 16],
        ids=lambda patience: f"patience={patience}",
    )
    def plugin(self, request: pytest.FixtureRequest) -> PluginUnderTest:
        return plugin_under_test(SPEC, patience=request.param)
