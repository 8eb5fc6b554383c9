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
    """As it comes: with blocks for whole answers."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        [spec] = nanovllm_schedulers()
        return plugin_under_test(spec)
