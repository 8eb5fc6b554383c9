"""The conformance suites of schedulers: a policy's, and a whole scheduler's.

An author's test file, whole:

    import pytest
    from nanovllm_core.testing import PluginUnderTest, SchedulingPolicyConformance
    from nanovllm_core.testing import plugin_under_test
    from my_plugin.plugin import SPEC

    class TestMyPolicy(SchedulingPolicyConformance):
        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)

The plugin drives the real engine, with a fake worker whose results come several steps late and
whose tokens betray every mistake with pages, rows and lengths; a policy through the core's own
scheduler. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanovllm_core.engine import Engine, TokenBudgetScheduler
from nanovllm_core.errors import SchedulerError
from nanovllm_core.interfaces.scheduler import RequestView, Scheduler, SchedulingPolicy
from nanovllm_core.interfaces.specs import SchedulerSpec
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.testing.conformance import PluginUnderTest
from nanovllm_core.testing.engine_harness import Harness, NoEndError, Setting
from nanovllm_core.testing.scheduler_labels import KeysOfLabelsConformance, LabelsConformance
from nanovllm_core.testing.scheduler_views import hours_pass, views
from nanovllm_core.testing.scheduler_watch import (
    ReadOnlyRequest,
    Rule,
    Watch,
    anything_goes,
    gives_real_work,
    keeps_the_budget,
    keeps_the_pages,
    keeps_the_rows,
)
from nanovllm_core.testing.traffic import Traffic, drive, traffic

SETTINGS = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,  # a plugin is right or wrong, today as tomorrow
    database=None,
    report_multiple_bugs=False,  # the first failure itself, not a group of all
    phases=(Phase.generate,),  # a verdict in seconds; shrinking a failing run takes minutes
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,  # the plugin under test is only read
        HealthCheck.differing_executors,  # a suite's checks are inherited
    ],
)
AHEAD = "{}_steps_ahead".format
STEPS_TO_END = 1000
"""For a few short prompts; one token of one prompt a step would take a fifth of it."""
LONGEST_BOUND = 200
"""Steps that the suite waits for a declared bound; for a longer one it skips."""


ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
FEW_ROWS = Setting(
    num_blocks=256,
    block_size=16,
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=512,
    prefix_caching=False,
)
FEW_PAGES = replace(FEW_ROWS, num_blocks=26, max_num_seqs=8, max_num_batched_tokens=40)
ENDLESS = [
    pytest.param(FEW_ROWS, 1, 3, id="few_rows_3_prompts_of_1"),
    pytest.param(FEW_ROWS, 9, 3, id="few_rows_3_prompts_of_9"),
    pytest.param(FEW_ROWS, 30, 2, id="few_rows_2_prompts_of_30"),
    pytest.param(FEW_PAGES, 13, 4, id="few_pages_4_prompts_of_13"),
    pytest.param(FEW_PAGES, 30, 2, id="few_pages_2_prompts_of_30"),
]
"""Engines that prompts of so many tokens, so many a step, keep busy for ever."""


def _assert_all_end(harness: Harness) -> None:
    harness.run()
    harness.check_all()


def _arrivals(harness: Harness, length: int, per_step: int, priority: int) -> Callable[[], None]:
    """Each call adds `per_step` requests."""
    numbers = itertools.count()
    params = replace(ONE_TOKEN, priority=priority)

    def arrive() -> None:
        for _ in range(per_step):
            harness.add(f"other {next(numbers)}", [2] * length, params)

    return arrive


def _admissions(watch: Watch) -> list[str]:
    """Who was admitted, in order."""
    return [
        share.request_id
        for decision in watch.decisions
        for share in decision.shares
        if share.request_id in decision.waiting
    ]


class _SchedulingConformance(LabelsConformance):
    """What holds at both levels."""

    engine_class: ClassVar[type[Engine]] = Engine
    """The engine that is driven; another one only to test the suite itself."""

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        """A fresh scheduler, as an engine makes one at its start."""
        raise NotImplementedError

    def run(self, plugin: PluginUnderTest, case: Traffic, rule: Rule) -> Watch:
        """Drive one case to its end, unless that does not come or another rule is broken before."""
        watch = Watch(self.make_scheduler(plugin), rule)
        with suppress(SchedulerError, NoEndError):
            drive(Harness(case.setting, watch, engine_class=self.engine_class), case.arrivals)
        return watch

    def harness(self, plugin: PluginUnderTest, setting: Setting) -> Harness:
        """An engine of these sizes with the scheduler under test."""
        watch = Watch(self.make_scheduler(plugin))
        return Harness(setting, watch, engine_class=self.engine_class)

    # -- any traffic: a rule at a time, then whether it ends

    @given(case=traffic())
    @SETTINGS
    def test_the_token_budget_is_kept(self, plugin: PluginUnderTest, case: Traffic) -> None:
        """Shares add up to no more than `token_budget`, after the prefix cache's part."""
        self.run(plugin, case, keeps_the_budget)

    @given(case=traffic())
    @SETTINGS
    def test_no_more_are_admitted_than_rows_are_free(
        self, plugin: PluginUnderTest, case: Traffic
    ) -> None:
        """`max_num_seqs` bounds who is resident, not who works in one step."""
        self.run(plugin, case, keeps_the_rows)

    @given(case=traffic())
    @SETTINGS
    def test_no_more_pages_are_given_out_than_are_free(
        self, plugin: PluginUnderTest, case: Traffic
    ) -> None:
        """Counted with `num_new_blocks`, which knows what is shared."""
        self.run(plugin, case, keeps_the_pages)

    @given(case=traffic())
    @SETTINGS
    def test_only_work_that_is_there_is_given_out(
        self, plugin: PluginUnderTest, case: Traffic
    ) -> None:
        """To requests that wait or are unfinished, once a step, within what they have left."""
        self.run(plugin, case, gives_real_work)

    @given(case=traffic())
    @SETTINGS
    def test_a_victim_is_one_of_the_running(self, plugin: PluginUnderTest, case: Traffic) -> None:
        """`choose_victim` names someone whose pages can be taken."""
        for running, victim in self.run(plugin, case, anything_goes).victims:
            assert victim in running, f"choose_victim gave {victim!r}, no id of {running}"

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_prompts_that_do_not_fit_together_all_end(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """Eight prompts of six pages in a cache of ten: what is begun can go on, none circles."""
        setting = replace(FEW_PAGES, num_blocks=10, block_size=4, steps_ahead=steps_ahead)
        harness = self.harness(plugin, setting)
        for name in "abcdefgh":
            harness.add(name, [ord(name) % 50] * 24, ONE_TOKEN)
        for _ in range(STEPS_TO_END):
            if harness.engine.has_unfinished():
                harness.step()
        stats = harness.engine.stats
        unfinished = harness.engine.has_unfinished()
        assert not unfinished, (
            f"after {STEPS_TO_END} steps {stats.finished} of 8 prompts have ended, and prompts "
            f"gave way to each other {stats.preemptions} times; begin a prompt only once the pages "
            "for all of it are free (num_new_blocks, free_blocks)"
        )
        harness.check_all()

    @given(case=traffic())
    @SETTINGS
    def test_every_request_ends_with_the_tokens_that_its_ids_decide(
        self, plugin: PluginUnderTest, case: Traffic
    ) -> None:
        """Whatever arrives, is aborted or gives way: nothing is lost, leaked or refused."""
        harness = self.harness(plugin, case.setting)
        drive(harness, case.arrivals)

    @given(case=traffic())
    @SETTINGS
    def test_the_same_traffic_is_decided_the_same_way(
        self, plugin: PluginUnderTest, case: Traffic
    ) -> None:
        """Two runs agree in every share and every victim: no clock, no dice, no shared state."""
        first = self.run(plugin, case, anything_goes)
        with hours_pass():
            second = self.run(plugin, case, anything_goes)
        assert first.decisions == second.decisions
        assert first.victims == second.victims

    # -- who comes and goes

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_an_aborted_request_that_waits_is_forgotten(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """It is never scheduled, and those behind it go on."""
        harness = self.harness(plugin, Setting(max_num_seqs=1, steps_ahead=steps_ahead))
        for name in "abcd":
            harness.add(name, [ord(name) % 50] * 9)
        harness.step()
        waiting = [name for name in "abcd" if not harness.requests[name, 0].block_ids]
        assert len(waiting) == 3, "one row, and not one of four requests has it"
        harness.engine.abort(waiting[1])
        _assert_all_end(harness)

    def test_an_id_may_come_again(self, plugin: PluginUnderTest) -> None:
        """Once its request has ended or was aborted, another may have it: it is a new request."""
        harness = self.harness(plugin, Setting(max_num_seqs=2))
        for length in (9, 30, 2):
            harness.add("again", [length] * length)
            harness.add("gone", [1] * length)
            harness.step()
            harness.engine.abort("gone")
            _assert_all_end(harness)
            harness.requests.clear()
            harness.finished.clear()

    @pytest.mark.parametrize("steps", [1, 2, 5], ids="aborted_after_{}".format)
    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_an_aborted_request_that_runs_makes_room(
        self, plugin: PluginUnderTest, steps_ahead: int, steps: int
    ) -> None:
        """In the middle of a prompt or of an answer, with steps in flight: the next one runs."""
        setting = Setting(
            max_num_seqs=1, max_num_batched_tokens=8, num_blocks=16, steps_ahead=steps_ahead
        )
        harness = self.harness(plugin, setting)
        harness.add("first", [1] * 30, SamplingParams(temperature=0, max_tokens=30))
        for _ in range(steps):
            harness.step()
        harness.add("second", [2] * 30, SamplingParams(temperature=0, max_tokens=30))
        harness.engine.abort("first")
        _assert_all_end(harness)

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_a_request_that_gave_way_waits_again_and_ends(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """Four answers outgrow the cache together; not one token of any is lost."""
        setting = Setting(num_blocks=14, prefix_caching=False, steps_ahead=steps_ahead)
        harness = self.harness(plugin, setting)
        for name in "abcd":
            answer = SamplingParams(temperature=0, max_tokens=30)
            harness.add(name, [ord(name) % 50] * 8, answer, stream=name in "ac")
        _assert_all_end(harness)

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_a_request_as_large_as_the_cache_ends(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """It takes every page and then the last one's last slot, beside others that gave way."""
        setting = Setting(num_blocks=8, max_model_len=33, steps_ahead=steps_ahead)
        harness = self.harness(plugin, setting)
        harness.add("small", [3] * 5)
        harness.add("whole", [1] * 20, SamplingParams(temperature=0, max_tokens=13))
        harness.add("more", [2] * 9)
        _assert_all_end(harness)

    def test_a_cached_prefix_is_not_computed_again(self, plugin: PluginUnderTest) -> None:
        """Of a prompt that is cached up to its last page, only the rest is given out."""
        harness = self.harness(plugin, Setting(max_num_batched_tokens=4, steps_ahead=0))
        for name in "ab":
            harness.add(name, range(23), SamplingParams(temperature=0, max_tokens=2))
            _assert_all_end(harness)
        assert harness.finished["b", 0].num_cached_tokens == 20

    # -- nobody starves

    @pytest.mark.parametrize("priority", [0, -1], ids="priority_{}".format)
    @pytest.mark.parametrize("before", [0, 3], ids="after_{}".format)
    @pytest.mark.parametrize("length", [2, 33, 400], ids="length_{}".format)
    @pytest.mark.parametrize(("setting", "others", "per_step"), ENDLESS)
    def test_nobody_is_passed_over_for_longer_than_declared(
        self,
        plugin: PluginUnderTest,
        setting: Setting,
        others: int,
        per_step: int,
        length: int,
        before: int,
        priority: int,
    ) -> None:
        """Under endless arrivals, as urgent or more, who is admitted first came within the bound.

        An admission before the watched request is of one that came earlier, or at most so many
        steps later as the plugin declares.
        """
        spec = plugin.spec
        assert isinstance(spec, SchedulerSpec)
        if spec.max_overtaking_steps is None:
            pytest.skip(f"{spec.name} declares no max_overtaking_steps, so nothing is promised")
        harness = self.harness(plugin, setting)
        arrive = _arrivals(harness, others, per_step, priority)
        for _ in range(before):
            arrive()
            harness.step()
        [request] = harness.add("watched", [1] * length, ONE_TOKEN)
        bound = spec.max_overtaking_steps(plugin.options, ReadOnlyRequest(request))
        if math.isinf(bound):
            pytest.skip(f"{spec.name} promises nothing with {plugin.options!r}")
        if bound > LONGEST_BOUND:
            pytest.skip(
                f"a bound of {bound:.0f} steps is too long to wait for; state `options` with one "
                f"of at most {LONGEST_BOUND}"
            )
        # Those who may pass, at a step or two each, then the prompt's own chunks.
        enough = 6 * per_step * (int(bound) + before + 2) + length // setting.max_num_batched_tokens
        for _ in range(enough + 50):
            if request.wait_steps is not None:
                break
            arrive()
            harness.step()
        assert request.wait_steps is not None, f"starved; the declared bound is {bound} steps"
        watch = harness.engine._planner.scheduler
        assert isinstance(watch, Watch)
        order = _admissions(watch)
        for name in order[: order.index("watched")]:
            later = harness.requests[name, 0].arrival_step - request.arrival_step
            assert later <= bound, f"{name} came {later} steps later; the bound is {bound}"


class SchedulingPolicyConformance(_SchedulingConformance, KeysOfLabelsConformance):
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

    @given(requests=st.lists(st.builds(ReadOnlyRequest, views()), min_size=2, max_size=6))
    @SETTINGS
    def test_keys_are_tuples_of_numbers_that_compare(
        self, plugin: PluginUnderTest, requests: list[RequestView]
    ) -> None:
        """Of one length, and never NaN, which would put a request anywhere."""
        for key in self._keys(plugin):
            values = [tuple(key(request)) for request in requests]
            assert len({len(value) for value in values}) == 1
            for value in values:
                assert value, "an empty key orders nothing"
                assert not any(math.isnan(number) for number in value), value
            sorted(values)

    @given(requests=st.lists(st.builds(ReadOnlyRequest, views()), min_size=2, max_size=6))
    @SETTINGS
    def test_a_key_is_the_same_whenever_it_is_read(
        self, plugin: PluginUnderTest, requests: list[RequestView]
    ) -> None:
        """It is read once, when a request joins: no clock, no count of calls, no other request."""
        for key in self._keys(plugin):
            first = [tuple(key(request)) for request in requests]
            with hours_pass():
                again = [tuple(key(request)) for request in reversed(requests)]
            assert again[::-1] == first

    def _keys(self, plugin: PluginUnderTest) -> list[Callable[[RequestView], tuple[float, ...]]]:
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
