"""The schedulers that come with the core pass the suites that everybody's must."""

from __future__ import annotations

import pytest

from nanovllm_core.engine import FcfsPolicy
from nanovllm_core.interfaces.scheduler import RequestView, Scheduler, SchedulingPolicy
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


class Urgent(SchedulingPolicy):
    """The lowest priority first, as requests ask; among equals whoever came first."""

    def __init__(self, options: NoOptions) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.priority, request.arrival_index)


class TestPolicyByPriority(SchedulingPolicyConformance):
    """A policy may read all that the contract names, so its keys follow the priority."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        spec = SchedulerSpec(name="urgent", impl=f"{__name__}:Urgent", contract=1, level="policy")
        return PluginUnderTest(spec, NoOptions(), "nanovllm_core.builtins")


class TestTokenBudgetScheduler(SchedulerConformance):
    """The scheduler that every policy runs in."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return PluginUnderTest(TOKEN_BUDGET, NoOptions(), "nanovllm_core.builtins")

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        scheduler: Scheduler = plugin.load()(FcfsPolicy())
        return scheduler
