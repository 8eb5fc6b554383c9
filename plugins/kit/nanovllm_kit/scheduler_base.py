"""What the checks of schedulers share: how an engine under test is made and driven."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from hypothesis.errors import Flaky

from nanovllm_core.engine import Engine
from nanovllm_core.errors import SchedulerError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import RequestView, Scheduler
from nanovllm_core.interfaces.specs import SchedulerSpec
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.engine_harness import Harness, NoEndError, Setting
from nanovllm_kit.scheduler_watch import Rule, Watch
from nanovllm_kit.traffic import Traffic, drive

Case = TypeVar("Case")

SETTINGS = settings(
    deadline=None,
    database=None,
    report_multiple_bugs=False,  # the first failure itself, not a group of all
    phases=(Phase.generate,),  # a verdict in seconds; shrinking a failing run takes minutes
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.differing_executors,  # a suite's checks are inherited
    ],
)
AHEAD = "{}_steps_ahead".format
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def for_each(
    cases: st.SearchStrategy[Case],
    draws: Random,
    check: Callable[[Case], None],
    examples: int = 40,
) -> None:
    """Call `check` with cases that the suite's seed decides; the failure shows the case.

    Also one that does not come again as hypothesis repeats the case: what fails once is wrong.
    """
    __tracebackhide__ = True

    @seed(draws.getrandbits(64))
    @settings(SETTINGS, max_examples=examples)
    @given(case=cases)
    def holds(case: Case) -> None:
        __tracebackhide__ = True
        check(case)

    try:
        holds()
    except Flaky as flaky:  # of state that the first call left, of dice, of a clock
        raise next(iter(getattr(flaky, "exceptions", [flaky]))) from None


def log_uniform(draws: Random, least: int, most: int) -> int:
    """A whole number from `least` to `most`; 10 to 20 is as likely as 1,000 to 2,000."""
    exponent = draws.uniform(math.log(least), math.log(most + 1))
    return min(most, max(least, int(math.exp(exponent))))


def assert_all_end(harness: Harness) -> None:
    """Run to the end; every request has its tokens."""
    harness.run()
    harness.check_all()


class SchedulingConformance(SpecConformance):
    """What the checks of both levels are made with."""

    engine_class: ClassVar[type[Engine]] = Engine
    """The engine that is driven; another one only to test the suite itself."""

    def make_scheduler(self, plugin: PluginUnderTest) -> Scheduler:
        """A fresh scheduler, as an engine makes one at its start."""
        raise NotImplementedError

    def run(self, plugin: PluginUnderTest, case: Traffic, rule: Rule) -> Watch:
        """Drive one case to its end, unless that does not come or another rule is broken before."""
        watch = Watch(self.make_scheduler(plugin), rule)
        with suppress(SchedulerError, NoEndError):
            drive(self.harness_of(watch, case.setting), case.arrivals)
        return watch

    def harness(self, plugin: PluginUnderTest, setting: Setting) -> Harness:
        """An engine of these sizes with the scheduler under test."""
        return self.harness_of(Watch(self.make_scheduler(plugin)), setting)

    def harness_of(self, scheduler: Scheduler, setting: Setting, *, debug: bool = True) -> Harness:
        """An engine with this scheduler. It sees no plan, so plans need not be copied."""
        return Harness(
            setting, scheduler, engine_class=self.engine_class, debug=debug, pickled=False
        )

    def bound(self, plugin: PluginUnderTest) -> Callable[[RequestView], float]:
        """The declared `max_overtaking_steps` of a request; infinity where none is declared."""
        spec = plugin.spec
        assert isinstance(spec, SchedulerSpec)
        declared = spec.max_overtaking_steps
        if declared is None:
            return lambda _request: math.inf

        def bound(request: RequestView) -> float:
            steps = declared(plugin.options, request)
            if isinstance(steps, bool) or not isinstance(steps, int | float) or not steps >= 0:
                raise AssertionError(
                    f"max_overtaking_steps of {spec.name} gave {steps!r} for a prompt of "
                    f"{request.num_prompt_tokens} tokens: it must give a number of steps, 0 or "
                    "more; math.inf promises nothing"
                )
            return steps

        return bound

    def declared_bound(self, plugin: PluginUnderTest) -> Callable[[RequestView], float]:
        """As `bound`; skips where the plugin declares none."""
        spec = plugin.spec
        assert isinstance(spec, SchedulerSpec)
        if spec.max_overtaking_steps is None:
            pytest.skip(f"{spec.name} declares no max_overtaking_steps, so nothing is promised")
        return self.bound(plugin)
