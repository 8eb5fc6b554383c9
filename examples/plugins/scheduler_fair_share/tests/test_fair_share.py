"""Who gets how many tokens, on the real engine with the fake worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st
from pydantic import ValidationError

from nanovllm_core.api import SamplingParams
from nanovllm_example_scheduler_fair_share.plugin import FairShareOptions
from nanovllm_example_scheduler_fair_share.scheduler import FairShareScheduler
from nanovllm_kit import (
    PluginUnderTest,
    SchedulingPolicyConformance,
    installed_plugin,
)
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.scheduler_watch import Watch

SIZES: dict[str, Any] = {"max_num_seqs": 4, "prefix_caching": False, "num_blocks": 128}


def fair(**options: Any) -> FairShareScheduler:
    return FairShareScheduler(FairShareOptions(**options))


def first_come_first_served() -> Any:
    """The core's own scheduler, for comparison."""
    plugin: PluginUnderTest = installed_plugin("scheduler", "fcfs")
    return SchedulingPolicyConformance().make_scheduler(plugin)


class Shares:
    """An engine, and what each tenant has been served since both wait."""

    def __init__(self, scheduler: Any, weights: Mapping[str, float], **sizes: Any) -> None:
        self.watch = Watch(scheduler)
        self.harness = Harness(Setting(**{**SIZES, **sizes}), self.watch)
        self.weights = weights
        self.count = dict.fromkeys(weights, 0)
        self.longest = dict.fromkeys(weights, (0, 0))
        self.since: dict[str, float] | None = None

    def arrive(self, tenant: str, prompt: int, answer: int, labels: Any = None) -> None:
        name = f"{tenant}{self.count[tenant]}"
        self.count[tenant] += 1
        longest_prompt, longest_answer = self.longest[tenant]
        self.longest[tenant] = max(longest_prompt, prompt), max(longest_answer, answer)
        params = SamplingParams(temperature=0, max_tokens=answer)
        said = {"tenant": tenant} if labels is None else labels
        self.harness.add(name, [self.count[tenant] % 50] * prompt, params, labels=said)

    def requests(self, tenant: str) -> Iterable[Any]:
        return (self.harness.requests[f"{tenant}{i}", 0] for i in range(self.count[tenant]))

    def served(self, tenant: str) -> float:
        """Tokens by weight, of prompts that were admitted and of answers."""
        begun = [request for request in self.requests(tenant) if request.wait_steps is not None]
        return sum(request.num_tokens for request in begun) / self.weights[tenant]

    def waits(self, tenant: str) -> bool:
        return any(request.wait_steps is None for request in self.requests(tenant))

    def bound(self) -> float:
        """The sum of U / w of the module's docstring; ageing is off in these tests."""
        rows = self.harness.setting.max_num_seqs
        return sum(
            (prompt + rows * answer) / self.weights[tenant]
            for tenant, (prompt, answer) in self.longest.items()
        )

    def admissions(self) -> list[str]:
        """Who was admitted, in order."""
        return [
            share.request_id
            for decision in self.watch.decisions
            for share in decision.shares
            if share.request_id in decision.waiting
        ]

    def step(self) -> float | None:
        """One step; how far the tenants are apart since all of them wait, None where not all do."""
        self.harness.step()
        if not all(self.waits(tenant) for tenant in self.weights):
            self.since = None
            return None
        now = {tenant: self.served(tenant) for tenant in self.weights}
        if self.since is None:
            self.since = now
        gained = [now[tenant] - self.since[tenant] for tenant in self.weights]
        return max(gained) - min(gained)

    def run(self) -> list[float]:
        """To the end; the distances at the steps in which all wait."""
        apart = []
        while self.harness.engine.has_unfinished():
            apart.append(self.step())
        self.harness.check_all()
        return [distance for distance in apart if distance is not None]


def flood(scheduler: Any, weight: float, answer: int = 6) -> Shares:
    """Fifty requests of A before one of B, then twelve of B, a few steps later."""
    shares = Shares(scheduler, {"A": 1.0, "B": weight})
    for _ in range(50):
        shares.arrive("A", 10, answer)
    for _ in range(5):
        shares.step()
    for _ in range(12):
        shares.arrive("B", 10, answer)
    return shares


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
def test_a_flood_takes_no_more_than_its_share(weight: float) -> None:
    """While both wait, their tokens by weight stay within the bound; first come breaks it."""
    shares = flood(fair(weights={"B": weight}, ageing=0), weight)
    apart = shares.run()
    assert len(apart) > 10
    assert max(apart) <= shares.bound()
    first = flood(first_come_first_served(), weight)
    assert max(first.run()) > 2 * first.bound()


def test_the_ratio_of_tokens_is_that_of_the_weights() -> None:
    """Of two that both flood the engine, one gets three times as much, give or take the bound."""
    shares = Shares(fair(weights={"A": 1.0, "B": 3.0}, ageing=0), {"A": 1.0, "B": 3.0})
    for _ in range(60):
        shares.arrive("A", 10, 6)
        shares.arrive("B", 10, 6)
    while shares.waits("B"):
        shares.step()
    assert shares.served("A") == pytest.approx(shares.served("B"), abs=shares.bound())
    tokens = {tenant: shares.served(tenant) * shares.weights[tenant] for tenant in "AB"}
    assert 2.6 < tokens["B"] / tokens["A"] < 3.4


sizes_of_requests = st.tuples(st.sampled_from("AB"), st.integers(1, 30), st.integers(1, 20))


@given(
    arrivals=st.lists(st.lists(sizes_of_requests, max_size=8), min_size=1, max_size=12),
    weight=st.sampled_from([0.25, 1.0, 2.0, 7.0]),
    rows=st.integers(1, 5),
    blocks=st.sampled_from([14, 24, 128]),
    steps_ahead=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate,))
@pytest.mark.slow
def test_tenants_that_both_wait_stay_within_the_bound(
    arrivals: list[list[tuple[str, int, int]]], weight: float, rows: int, blocks: int, **sizes: int
) -> None:
    """Of any lengths, weights and sizes, with preemptions, whenever they come."""
    shares = Shares(
        fair(weights={"B": weight}, ageing=0),
        {"A": 1.0, "B": weight},
        max_num_seqs=rows,
        num_blocks=blocks,
        **sizes,
    )
    apart = []
    for now in arrivals:
        for tenant, prompt, answer in now:
            shares.arrive(tenant, prompt, answer)
        if shares.harness.engine.has_unfinished():
            apart.append(shares.step())
    found = [distance for distance in apart if distance is not None] + shares.run()
    assert max(found, default=0) <= shares.bound()


def test_a_tenant_alone_gets_everything() -> None:
    """Decision by decision what first come, first served would give it; no share is kept back."""
    decided = []
    for scheduler in (fair(weights={"A": 0.01}), first_come_first_served()):
        shares = Shares(scheduler, {"A": 1.0})
        for number in range(50):
            shares.arrive("A", 1 + number % 30, 1 + number % 7)
        shares.run()
        decided.append(shares.watch.decisions)
    assert decided[0] == decided[1]


def test_what_one_tenant_does_not_use_the_others_get() -> None:
    """Fifty requests of one beside two of the other end in as few steps as in any order."""
    steps = []
    for scheduler in (fair(weights={"B": 100.0}), first_come_first_served()):
        shares = Shares(scheduler, {"A": 1.0, "B": 100.0})
        for tenant, count in (("A", 50), ("B", 2)):
            for _ in range(count):
                shares.arrive(tenant, 10, 6)
        shares.run()
        steps.append(shares.harness.engine.stats.steps)
    assert steps[0] == steps[1]


def test_a_pause_saves_no_credit() -> None:
    """B comes after A alone was served for long: from then on they share, and B gets no more."""
    shares = Shares(fair(ageing=0), {"A": 1.0, "B": 1.0})
    for _ in range(90):
        shares.arrive("A", 10, 6)
    for _ in range(60):
        shares.step()
    assert shares.served("A") > 4 * shares.bound()
    for _ in range(30):
        shares.arrive("B", 10, 6)
    apart = shares.run()
    assert len(apart) > 20
    assert max(apart) <= shares.bound()


def test_a_newcomer_starts_at_the_lowest_counter_of_those_who_wait() -> None:
    """As it is in that moment: with the tokens just written, and without those who were aborted."""
    scheduler = fair(ageing=0)
    weights = dict.fromkeys("ABCD", 1.0)
    shares = Shares(scheduler, weights, max_num_seqs=1, steps_ahead=0)
    for _ in range(2):
        shares.arrive("A", 10, 40)
    for _ in range(6):
        shares.step()
    shares.arrive("B", 10, 5)
    lowest = shares.served("A")
    assert scheduler._counters["B"] == lowest > 10
    for _ in range(6):
        shares.step()
    shares.arrive("C", 10, 5)
    assert scheduler._counters["C"] == lowest < shares.served("A")
    for name in ("B0", "C0"):
        shares.harness.engine.abort(name)
    shares.arrive("D", 10, 5)
    assert scheduler._counters["D"] == shares.served("A")
    shares.run()


def test_a_big_request_is_not_passed_over_for_want_of_blocks() -> None:
    """It is next and does not fit yet; a small one of another tenant must not take its blocks."""
    shares = Shares(fair(ageing=0), dict.fromkeys("ABC", 1.0), num_blocks=16)
    shares.arrive("A", 20, 20)
    shares.step()
    shares.arrive("B", 48, 8)
    shares.arrive("C", 4, 8)
    shares.run()
    assert shares.admissions()[:3] == ["A0", "B0", "C0"]


def test_requests_without_the_label_are_one_tenant() -> None:
    """Whatever else they carry; its name is the empty text, and it may have a weight."""
    weights = {"A": 1.0, "B": 2.0}
    shares = Shares(fair(label="customer", weights={"": 2.0}, ageing=0), weights)
    for number in range(50):
        shares.arrive("A", 10, 6, labels={"customer": "A", "tenant": "B"})
        shares.arrive(
            "B", 10, 6, labels=[None, {"tenant": "A"}, {"customer": ""}][number % 3] or {}
        )
    apart = shares.run()
    assert len(apart) > 20
    assert max(apart) <= shares.bound()


def waiting_beside_newcomers(ageing: float, steps: int) -> int | None:
    """Steps until the second request of A is admitted, while two new tenants come in every step."""
    harness = Harness(
        Setting(**{**SIZES, "max_num_seqs": 1, "steps_ahead": 0}), fair(ageing=ageing)
    )
    one = SamplingParams(temperature=0, max_tokens=1)
    harness.add("A0", [1] * 20, one, labels={"tenant": "A"})
    [watched] = harness.add("A1", [1] * 20, one, labels={"tenant": "A"})
    for step in range(steps):
        for which in "xy":
            name = f"{which}{step}"
            harness.add(name, [2] * 3, one, labels={"tenant": name})
        harness.step()
        if watched.wait_steps is not None:
            return watched.wait_steps
    return None


def test_ageing_serves_a_request_beside_endless_new_tenants() -> None:
    """A was served 20 tokens more than each newcomer; a step of waiting makes up for `ageing`."""
    assert waiting_beside_newcomers(ageing=0, steps=200) is None
    waits = [waiting_beside_newcomers(ageing, steps=200) for ageing in (0.5, 1.0, 4.0)]
    assert all(wait is not None for wait in waits)
    assert waits == sorted(waits, key=lambda wait: -(wait or 0))
    assert len(set(waits)) == 3


def test_the_tenant_that_was_served_most_is_preempted() -> None:
    """Its newest request, though that of the other tenant came later."""
    shares = Shares(fair(ageing=0), {"A": 1.0, "B": 1.0}, num_blocks=20, max_model_len=64)
    for _ in range(3):
        shares.arrive("A", 8, 30)
    for _ in range(3):
        shares.step()
    shares.arrive("B", 8, 30)
    shares.run()
    victims = [victim for _, victim in shares.watch.victims]
    assert victims
    assert victims[0] == "A2"
    assert "B0" not in victims


def test_every_token_is_charged_once() -> None:
    """Not those of a cached prefix, and not again what a preemption computes again.

    Also of B, which has nothing else that waits when its one request is preempted.
    """
    weights = {"A": 1.0, "B": 0.125}
    scheduler = fair(weights=weights)
    harness = Harness(Setting(max_num_seqs=3, num_blocks=18), scheduler)
    answer = SamplingParams(temperature=0, max_tokens=24)
    tenants = ["A", "B", *"AAAAAAAAAA"]
    requests = [
        harness.add(str(number), [7] * 8 + [number] * 8, answer, labels={"tenant": tenant})[0]
        for number, tenant in enumerate(tenants)
    ]
    while any(request.wait_steps is None for request in requests):
        harness.step()
        scheduler._settle()
        for tenant in "AB" if scheduler._queues else "":  # else counters start again
            tokens = sum(
                request.num_tokens - request.num_cached_tokens
                for request in requests
                if request.wait_steps is not None and request.labels["tenant"] == tenant
            )
            assert scheduler._counters[tenant] * weights[tenant] == tokens
    assert requests[1].num_preemptions > 0
    assert harness.engine.stats.preemptions > 3
    assert harness.engine.stats.prefix_hit_tokens > 0
    harness.run()
    harness.check_all()


def test_what_is_over_is_forgotten() -> None:
    """Requests, aborted ones too, and tenants: a thousand come and go one after another."""
    scheduler = fair()
    harness = Harness(Setting(**SIZES), scheduler)
    for number in range(200):
        for which in "xy":
            name = f"{which}{number}"
            harness.add(name, [1] * 5, labels={"tenant": name})
        harness.engine.abort(f"y{number}")
        harness.run()
    harness.check_all()
    harness.add("last", [1] * 5)
    harness.step()
    state = [value for value in vars(scheduler).values() if isinstance(value, dict)]
    assert state
    assert all(len(value) <= 2 for value in state), state


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": {"a": 0}},
        {"weights": {"a": -1}},
        {"weights": {"a": float("nan")}},
        {"default_weight": float("inf")},
        {"default_weight": 0},
        {"label": ""},
        {"label": "x" * 65},
        {"ageing": -1},
        {"weight": {"a": 1}},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FairShareOptions.model_validate(wrong)
