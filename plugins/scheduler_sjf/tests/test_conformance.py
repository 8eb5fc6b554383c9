"""The suite that every scheduling policy passes."""

from __future__ import annotations

import pytest

from nanovllm_kit import (
    PluginUnderTest,
    SchedulingPolicyConformance,
    plugin_under_test,
)
from nanovllm_scheduler_sjf.plugin import nanovllm_schedulers


class TestSjf(SchedulingPolicyConformance):
    """As it comes, where a step of waiting is worth 16 tokens, and without ageing."""

    @pytest.fixture(params=[16.0, 0.0], ids=lambda ageing: f"ageing={ageing}")
    def plugin(self, request: pytest.FixtureRequest) -> PluginUnderTest:
        [spec] = nanovllm_schedulers()
        return plugin_under_test(spec, ageing=request.param)
