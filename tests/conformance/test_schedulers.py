"""The schedulers that come with the core pass the suites that everybody's must."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from random import Random
from typing import Any

import pytest

from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import SchedulerError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_kit import (
    PluginUnderTest,
    SchedulerConformance,
    SchedulingPolicyConformance,
    installed_plugin,
)
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.scheduler_watch import (
    Decision,
    gives_real_work,
    keeps_the_blocks,
    keeps_the_budget,
    keeps_the_rows,
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
        return PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")


class TestTokenBudgetScheduler(SchedulerConformance):
    """The scheduler that every policy runs in."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return PluginUnderTest(TOKEN_BUDGET, NoOptions(), "nanovllm_core.registry.builtins")

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


class Eager(TokenBudgetScheduler):
    """Everybody begins at once, with one token; prompts that are begun get what is left."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        shares: list[PrefillShare] = []
        tokens, rows, blocks = state.token_budget, state.free_rows, state.free_blocks
        for request in (*sorted(state.waiting, key=lambda r: r.arrival_index), *state.prefilling):
            begun = request in state.prefilling
            given = min(tokens, request.num_tokens - request.num_scheduled if begun else 1)
            while given and state.num_new_blocks(request, given) > blocks:
                given -= 1
            if given and (begun or rows):
                shares.append(PrefillShare(request.request_id, given))
                tokens, rows = tokens - given, rows - (not begun)
                blocks -= state.num_new_blocks(request, given)
        return shares


class NamesNobody(TokenBudgetScheduler):
    """A victim by its view, where the contract asks for its id."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())

    def choose_victim(self, running: Sequence[RequestView]) -> Any:
        return running[0]


class Idle(TokenBudgetScheduler):
    """Nothing for anybody."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(FcfsPolicy())

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return []


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
        (NamesNobody, "test_a_victim_is_one_of_the_running"),
        (Impatient, "test_the_same_traffic_is_decided_the_same_way"),
    ],
)
def test_a_wrong_scheduler_fails_the_check_that_is_about_it(
    wrong: type[Scheduler], check: str
) -> None:
    """Bugs that other checks let through."""
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:{wrong.__name__}")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    holds = getattr(SchedulerConformance(), check)
    drawn = {"draws": Random(0)} if "draws" in signature(holds).parameters else {}
    with pytest.raises((AssertionError, SchedulerError)):
        holds(plugin, **drawn)


def harness_of(scheduler: type[Scheduler], **sizes: Any) -> Harness:
    """An engine as the suite makes it, with four answers that outgrow its cache together."""
    plugin = PluginUnderTest(
        replace(TOKEN_BUDGET, impl=f"{__name__}:{scheduler.__name__}"),
        NoOptions(),
        "nanovllm_core.registry.builtins",
    )
    harness = SchedulerConformance().harness(plugin, Setting(num_blocks=14, **sizes))
    for name in "abcd":
        harness.add(name, [ord(name) % 50] * 8, SamplingParams(temperature=0, max_tokens=30))
    return harness


def test_the_core_s_errors_name_the_author_s_class_and_requests() -> None:
    """Not what the suite wraps around them."""
    with pytest.raises(SchedulerError, match=r"^Idle scheduled nothing while nothing runs"):
        harness_of(Idle).run()
    with pytest.raises(SchedulerError, match=r"^NamesNobody chose <RequestView 'a'> as the victim"):
        harness_of(NamesNobody).run()


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_scheduler_that_begins_what_cannot_be_held_is_told_so(steps_ahead: int) -> None:
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:Eager")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    check = SchedulerConformance().test_prompts_that_do_not_fit_together_all_end
    with pytest.raises(SchedulerError, match=r"^Eager preempts in a circle: .*admit a prompt on"):
        check(plugin, steps_ahead)


def test_traffic_without_end_is_no_fault_of_the_rules_for_one_decision() -> None:
    """It fails the checks that are about an end, and not whichever is the first to meet it."""
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:Eager")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    SchedulerConformance().test_only_work_that_is_there_is_given_out(plugin, Random(0))


def test_the_rules_say_which_number_broke_which_limit() -> None:
    decision = Decision(
        step=10,
        waiting=("a", "b"),
        prefilling=("c",),
        missing={"a": 5, "b": 9, "c": 1},
        token_budget=4,
        free_rows=1,
        free_blocks=1,
        shares=(PrefillShare("a", 6), PrefillShare("b", 1)),
        num_tokens=7,
        num_rows=2,
        num_blocks=3,
    )
    twice = replace(decision, shares=(PrefillShare("b", 1), PrefillShare("b", 2)))
    nobody = replace(decision, shares=(PrefillShare("x", 1),))
    for rule, broken, message in (
        (keeps_the_blocks, decision, "step 10: 3 blocks given out, 1 free"),
        (keeps_the_rows, decision, "step 10: 2 rows given out, 1 free"),
        (keeps_the_budget, decision, "step 10: 7 tokens given out, 4 in the budget"),
        (gives_real_work, decision, "step 10: 'a' got 6 tokens, of 1 to 5 that are left"),
        (gives_real_work, twice, "step 10: 'b' got two shares"),
        (gives_real_work, nobody, "step 10: 'x' neither waits nor has an unfinished prompt"),
    ):
        with pytest.raises(AssertionError) as caught:
            rule(broken)
        assert str(caught.value).partition("\n")[0] == message


def test_a_bound_is_broken_by_more_urgent_requests() -> None:
    """Strict classes without ageing keep no bound, though equals are served as they came."""
    spec = replace(TOKEN_BUDGET, impl=f"{__name__}:Urgent", level="policy")
    plugin = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    suite = SchedulingPolicyConformance()
    with pytest.raises(AssertionError, match="the declared bound is 0 steps"):
        suite.test_no_request_is_passed_over_for_longer_than_declared(plugin, Random(0))
    with pytest.raises(AssertionError, match="the declared bound is 0 steps"):
        suite.test_keys_keep_the_declared_bound(plugin, Random(0))
