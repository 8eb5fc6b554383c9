"""The schedulers that come with the core pass the suites that everybody's must."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import SchedulerError
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_core.testing import (
    PluginUnderTest,
    SchedulerConformance,
    SchedulingPolicyConformance,
    installed_plugin,
)
from nanovllm_core.testing.scheduler import FEW_ROWS

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


class Lazy(TokenBudgetScheduler):
    """Shares that can be read once only; the core reads them more than once."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())

    def schedule(self, state: SchedulerState) -> Any:
        return (share for share in super().schedule(state))


class Forgetless(TokenBudgetScheduler):
    """A request that was served once is never served under the same id again."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())
        self.served: dict[str, int] = {}

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        indices = {r.request_id: r.arrival_index for r in (*state.waiting, *state.prefilling)}
        shares = super().schedule(state)
        for share in shares:
            self.served.setdefault(share.request_id, indices[share.request_id])
        return [s for s in shares if self.served[s.request_id] == indices[s.request_id]]


class Impatient(TokenBudgetScheduler):
    """Whoever has waited for a minute of the clock comes before the others, newest first."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())
        self.since = time.monotonic()

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        late = time.monotonic() - self.since > 60
        return (min if late else max)(running, key=lambda r: r.arrival_index).request_id


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Lazy, "test_every_request_ends_with_the_tokens_that_its_ids_decide"),
        (Forgetless, "test_an_id_may_come_again"),
        (Impatient, "test_the_same_traffic_is_decided_the_same_way"),
    ],
)
def test_a_wrong_scheduler_fails_the_check_that_is_about_it(
    wrong: type[Scheduler], check: str
) -> None:
    """Bugs that other checks let through."""
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:{wrong.__name__}")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.builtins")
    with pytest.raises((AssertionError, SchedulerError)):
        getattr(SchedulerConformance(), check)(plugin)


def test_a_bound_is_broken_by_more_urgent_requests() -> None:
    """Strict classes without ageing keep no bound, though equals are served as they came."""
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:Urgent", level="policy")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.builtins")
    check = SchedulingPolicyConformance().test_nobody_is_passed_over_for_longer_than_declared
    check(plugin, FEW_ROWS, 30, 2, length=33, before=3, priority=0)
    with pytest.raises(AssertionError, match="starved"):
        check(plugin, FEW_ROWS, 30, 2, length=33, before=3, priority=-1)
