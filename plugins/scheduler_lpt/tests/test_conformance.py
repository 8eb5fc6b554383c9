"""The suite that every scheduling policy passes."""

from __future__ import annotations

import pytest

from nanovllm_kit import (
    PluginUnderTest,
    SchedulingPolicyConformance,
    plugin_under_test,
)
from nanovllm_scheduler_lpt.plugin import nanovllm_schedulers


class TestLpt(SchedulingPolicyConformance):
    """As it comes, and where nothing is reserved, so that requests are preempted."""

    @pytest.fixture(params=[1.0, 0.0], ids=lambda reserve: f"reserve={reserve}")
    def plugin(self, request: pytest.FixtureRequest) -> PluginUnderTest:
        [spec] = nanovllm_schedulers()
        return plugin_under_test(spec, reserve=request.param)
