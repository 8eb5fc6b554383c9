"""The suite that every whole scheduler passes."""

from __future__ import annotations

import pytest

from nanovllm_example_scheduler_fair_share.plugin import SPEC
from nanovllm_kit import PluginUnderTest, SchedulerConformance, plugin_under_test


class TestFairShare(SchedulerConformance):
    """The suite's traffic comes from tenants `a`, `b`, unheard-of ones and none."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC, weights={"a": 3.0, "": 0.5})
