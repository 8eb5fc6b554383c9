"""The scheduler keeps the contract of whole schedulers."""

from __future__ import annotations

import pytest
from nanovllm_kit import PluginUnderTest, SchedulerConformance, plugin_under_test

from nanovllm_scheduler_my_plugin.plugin import SPEC


class TestMyPlugin(SchedulerConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
