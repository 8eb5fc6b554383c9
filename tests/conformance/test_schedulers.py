"""The schedulers that come with the core pass the suites that everybody's must."""

from __future__ import annotations

import pytest

from nanovllm_core.engine import FcfsPolicy
from nanovllm_core.interfaces.scheduler import Scheduler
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_core.testing import (
    PluginUnderTest,
    SchedulerConformance,
    SchedulingPolicyConformance,
    installed_plugin,
)

TOKEN_BUDGET = SchedulerSpec(
    name="token_budget",
    impl="nanovllm_core.engine.scheduler:TokenBudgetScheduler",
    contract=1,
    level="scheduler",
    max_overtaking_steps=lambda _options, _request: 0,
)
"""The core's own scheduler as if it were a plugin, first come, first served."""


class TestFcfs(SchedulingPolicyConformance):
    """The built-in policy."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return installed_plugin("scheduler", "fcfs")


class TestTokenBudgetScheduler(SchedulerConformance):
    """The scheduler that every policy runs in."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return PluginUnderTest(TOKEN_BUDGET, NoOptions(), "nanovllm_core.builtins")

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        scheduler: Scheduler = plugin.load()(FcfsPolicy())
        return scheduler
