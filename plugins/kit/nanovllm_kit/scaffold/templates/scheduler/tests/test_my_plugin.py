"""The policy keeps the contract of scheduling policies, and its own promise."""

from __future__ import annotations

import pytest
from nanovllm_kit import (
    PluginUnderTest,
    SchedulingPolicyConformance,
    plugin_under_test,
)

from nanovllm_scheduler_my_plugin.plugin import SPEC


class TestMyPlugin(SchedulingPolicyConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
