"""The conformance suites of schedulers: a policy's, and a whole scheduler's.

An author's test file, whole:

    import pytest
    from nanovllm_kit import PluginUnderTest, SchedulingPolicyConformance
    from nanovllm_kit import plugin_under_test
    from my_plugin.plugin import SPEC

    class TestMyPolicy(SchedulingPolicyConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)

The plugin drives the real engine, with a fake worker whose results come several steps late and
whose tokens betray every mistake with blocks, rows and lengths; a policy through the core's own
scheduler. The checks of both levels are in seven files, by what they are about. Nothing here
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from nanovllm_core.engine import TokenBudgetScheduler
from nanovllm_core.interfaces.scheduler import RequestView, Scheduler, SchedulingPolicy
from nanovllm_core.interfaces.specs import SchedulerSpec
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.scheduler_base import for_each
from nanovllm_kit.scheduler_decisions import SchedulerDecisions
from nanovllm_kit.scheduler_fairness import SchedulerFairness
from nanovllm_kit.scheduler_growth import SchedulerGrowth
from nanovllm_kit.scheduler_labels import KeysOfLabels, SchedulerLabels
from nanovllm_kit.scheduler_memory import SchedulerMemory
from nanovllm_kit.scheduler_progress import SchedulerProgress
from nanovllm_kit.scheduler_queue import SchedulerQueue
from nanovllm_kit.scheduler_views import View, hours_pass, views
from nanovllm_kit.scheduler_watch import ReadOnlyRequest

Key = Callable[[RequestView], tuple[float, ...]]
REQUESTS = st.lists(st.builds(ReadOnlyRequest, views()), min_size=2, max_size=6)
READINGS = 300
"""More than a count of calls, or of requests, goes unnoticed for."""


def _another(view: View, number: int, draws: Random) -> View:
    """Some other request; few ids, for an id may come again."""
    prompt = 1 + draws.getrandbits(draws.randint(1, 16))
    return replace(
        view,
        request_id=f"other {number % 50}",
        arrival_index=view.arrival_index + number + 1,
        arrival_step=view.arrival_step + number,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        max_length=prompt + 9,
    )


# pytest runs the last base's checks first: the decisions, whose failures tell most, then what takes
# a longer run.
class _SchedulingConformance(
    SchedulerGrowth,
    SchedulerMemory,
    SchedulerFairness,
    SchedulerProgress,
    SchedulerLabels,
    SchedulerQueue,
    SchedulerDecisions,
):
    """What holds at both levels."""


class SchedulingPolicyConformance(_SchedulingConformance, KeysOfLabels):
    """For `level="policy"`: the keys, and what the core's scheduler does with them."""

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        return TokenBudgetScheduler(self.make_policy(plugin))

    def make_policy(self, plugin: PluginUnderTest) -> SchedulingPolicy:
        """A fresh policy."""
        policy: SchedulingPolicy = plugin.load()(plugin.options)
        return policy

    def test_the_spec_says_policy(self, plugin: PluginUnderTest) -> None:
        """`impl` is a `SchedulingPolicy`, and `level` says so."""
        assert isinstance(plugin.spec, SchedulerSpec)
        assert plugin.spec.level == "policy"
        assert issubclass(plugin.load(), SchedulingPolicy)

    def test_keys_are_tuples_of_numbers_that_compare(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Of one length, and never NaN, which would put a request anywhere."""

        def compare(requests: Sequence[RequestView]) -> None:
            for key in self._keys(plugin):
                values = [tuple(key(request)) for request in requests]
                assert len({len(value) for value in values}) == 1
                for value in values:
                    assert value, "an empty key orders nothing"
                    assert not any(math.isnan(number) for number in value), value
                sorted(values)

        for_each(REQUESTS, draws, compare)

    def test_a_key_is_the_same_whenever_it_is_read(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """It is read once, when a request joins: no clock, no count of calls, no other request."""

        def agree(requests: Sequence[RequestView]) -> None:
            for key in self._keys(plugin):
                first = [tuple(key(request)) for request in requests]
                with hours_pass():
                    again = [tuple(key(request)) for request in reversed(requests)]
                assert again[::-1] == first

        for_each(REQUESTS, draws, agree)

    def test_a_key_is_the_same_however_often_it_is_read(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """After hundreds of other requests, and of joins of the same one with more outputs."""

        def agree(view: View) -> None:
            others = [_another(view, reading, draws) for reading in range(READINGS)]
            for used, fresh in zip(self._keys(plugin), self._keys(plugin), strict=True):
                first = tuple(used(ReadOnlyRequest(view)))
                for other in others:
                    used(ReadOnlyRequest(other))
                    used(ReadOnlyRequest(replace(view, num_tokens=other.num_tokens)))
                again = tuple(used(ReadOnlyRequest(view)))
                assert again == first, f"another key after {READINGS} other requests"
                for other in draws.sample(others, 9):
                    expected = tuple(fresh(ReadOnlyRequest(other)))
                    assert tuple(used(ReadOnlyRequest(other))) == expected, (
                        "another key than a fresh policy gives"
                    )

        for_each(views(waiting=True), draws, agree, examples=8)

    def test_keys_keep_the_declared_bound(self, plugin: PluginUnderTest, draws: Random) -> None:
        """Whatever arrives later than the bound has no lower key: of any two requests that join."""
        bound = self.declared_bound(plugin)
        key = self.make_policy(plugin).service_key

        def keep(pair: tuple[View, View]) -> None:
            first, second = pair
            steps = bound(ReadOnlyRequest(first))
            if math.isinf(steps):
                return
            later = math.floor(steps) + 1
            second.arrival_step = first.arrival_step + later + second.arrival_step % 7
            second.arrival_index = first.arrival_index + 1 + second.arrival_index % 1_000
            keys = [tuple(key(ReadOnlyRequest(one))) for one in pair]
            assert keys[0] <= keys[1], (
                f"{second} would be admitted before {first}, with the key {keys[1]} before "
                f"{keys[0]}; the declared bound is {steps:g} steps"
            )

        for_each(st.tuples(views(waiting=True), views(waiting=True)), draws, keep, examples=120)

    def _keys(self, plugin: PluginUnderTest) -> list[Key]:
        policy = self.make_policy(plugin)
        return [policy.service_key, policy.victim_key]


class SchedulerConformance(_SchedulingConformance):
    """For `level="scheduler"`: every decision of every step."""

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        scheduler: Scheduler = plugin.load()(plugin.options)
        return scheduler

    def test_the_spec_says_scheduler(self, plugin: PluginUnderTest) -> None:
        """`impl` is a `Scheduler`, and `level` says so."""
        assert isinstance(plugin.spec, SchedulerSpec)
        assert plugin.spec.level == "scheduler"
        assert issubclass(plugin.load(), Scheduler)
