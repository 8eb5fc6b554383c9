"""Checks that a scheduler's work grows no faster than sorting does, in steps and not in seconds.

The suite plays the engine's side with endless blocks and no worker, so that thousands may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import cast

from nanovllm_core.interfaces.request_labels import check_labels
from nanovllm_core.interfaces.scheduler import RequestView, Scheduler, SchedulerState
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.scheduler_base import SchedulingConformance, log_uniform
from nanovllm_kit.scheduler_views import View
from nanovllm_kit.scheduler_watch import ReadOnlyRequest
from nanovllm_kit.scheduler_work import (
    CountedQueue,
    CountedRequest,
    Meter,
    work_limit,
)

BLOCK_SIZE = 16
"""Tokens."""
STEPS_PER_DROP = 64
"""Of dropping an entry off a heap of thousands: a dozen comparisons of keys, up to 4 steps each."""


class BareQueue:
    """An engine's calls of a scheduler, each held to the work that the contract allows."""

    def __init__(self, scheduler: Scheduler, draws: Random) -> None:
        self.scheduler = scheduler
        self.draws = draws
        self.meter = Meter()
        self.facts: dict[str, View] = {}
        self.waiting: dict[str, RequestView] = {}
        self.running: dict[str, RequestView] = {}
        self.step = 0
        self.left = 0
        """Those that left the queue: a heap drops each of them as it comes up, once."""

    def add(self, facts: Sequence[View]) -> None:
        """Many arrive before the next step."""
        for one in facts:
            counted = CountedRequest(ReadOnlyRequest(one), self.meter)
            self.step = max(self.step, one.arrival_step + 1)
            self.facts[one.request_id] = one
            self.waiting[one.request_id] = cast(RequestView, counted)
        n = len(self.waiting) + len(self.running)
        with self.meter.at_most(work_limit(n), f"add() of {len(facts)} requests, {n} in all,"):
            for one in facts:
                self.scheduler.add(self.waiting[one.request_id])

    def remove(self, request_id: str) -> RequestView:
        """Someone leaves the queue."""
        n = len(self.waiting) + len(self.running)
        with self.meter.at_most(work_limit(n), f"remove() with {n} requests"):
            self.scheduler.remove(self.waiting[request_id])
        self.left += 1
        return self.waiting.pop(request_id)

    def schedule(self, token_budget: int, rows: int) -> None:
        """One step; what is given out is taken as computed."""
        prefilling = [r for name, r in self.running.items() if self._missing(name)]
        decoding = [r for name, r in self.running.items() if not self._missing(name)]
        state = SchedulerState(
            step=self.step,
            waiting=CountedQueue([*self.waiting.values()], self.meter),
            prefilling=tuple(prefilling),
            decoding=tuple(decoding),
            token_budget=token_budget,
            free_rows=rows - len(self.running),
            free_blocks=10**9,
            num_cached_tokens=self._num_cached_tokens,
            num_new_blocks=self._num_new_blocks,
        )
        n = len(self.waiting) + len(self.running)
        with self.meter.at_most(work_limit(n + self.left), f"schedule() with {n} requests"):
            shares = self.scheduler.schedule(state)
        self.left = max(0, self.left - self.meter.steps // STEPS_PER_DROP)
        for share in shares:
            name, num_tokens = str(share.request_id), int(share.num_tokens)
            if name in self.waiting:
                self.running[name] = self.remove(name)
            done = self.facts[name].num_scheduled + num_tokens
            self.facts[name].num_scheduled = done
        self.step += 1

    def preempt(self, count: int) -> None:
        """So many are preempted, one after the other, and wait again."""
        for _ in range(min(count, len(self.running))):
            n = len(self.running)
            running = self.draws.sample([*self.running.values()], n)
            with self.meter.at_most(work_limit(n), f"choose_victim() with {n} running"):
                victim = str(self.scheduler.choose_victim(tuple(running)))
            del self.running[victim]
            self.facts[victim].num_scheduled = 0
            self.add([self.facts[victim]])

    def _missing(self, name: str) -> int:
        return self.facts[name].num_tokens - self.facts[name].num_scheduled

    def _num_cached_tokens(self, _request: RequestView) -> int:
        self.meter.count()
        return 0

    def _num_new_blocks(self, request: RequestView, num_tokens: int) -> int:
        self.meter.count()
        done = self.facts[str(request.request_id)].num_scheduled
        return -(-(done + num_tokens) // BLOCK_SIZE) - -(-done // BLOCK_SIZE)


def draw_queue(draws: Random, count: int, first: int = 0) -> list[View]:
    """So many requests of any lengths and classes, numbered from `first`."""
    facts = []
    for index in range(first, first + count):
        prompt = log_uniform(draws, 1, 2_000)
        facts.append(
            View(
                request_id=f"r{index}",
                arrival_step=index // 10,
                arrival_index=index,
                priority=draws.randint(-2, 2),
                labels=check_labels({"tenant": draws.choice("abc")}),
                num_prompt_tokens=prompt,
                num_tokens=prompt,
                num_scheduled=0,
                max_length=prompt + draws.randint(1, 500),
            )
        )
    return facts


class SchedulerGrowth(SchedulingConformance):
    """Work grows as n log n with those that are there, not faster, nor with those that were."""

    def test_the_work_of_a_step_grows_no_faster_than_a_sort(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """With thousands waiting, and with hundreds running: lines, calls, comparisons and hashes.

        `schedule` and `choose_victim` may sort what they are shown, `add` may keep a queue in
        order, and `remove` may look through it once.
        """
        for count, rows in (
            (draws.randint(2_000, 4_000), draws.randint(1, 16)),
            (draws.randint(600, 1_000), 2_000),
        ):
            queue = BareQueue(self.make_scheduler(plugin), draws)
            queue.add(draw_queue(draws, count))
            for name in draws.sample(sorted(queue.waiting), 10):
                queue.remove(name)
            for _ in range(3):
                queue.schedule(draws.choice([rows, 512, 10**7]), rows)
            for _ in range(2):
                queue.schedule(10**7, rows)
                queue.preempt(16)

    def test_those_who_left_are_no_work(self, plugin: PluginUnderTest, draws: Random) -> None:
        """Thousands that were aborted or served cost nothing in the steps behind."""
        queue = BareQueue(self.make_scheduler(plugin), draws)
        count = draws.randint(1_500, 2_500)
        queue.add(draw_queue(draws, count))
        for name in [*queue.waiting]:
            queue.remove(name)
        queue.add(draw_queue(draws, 3, first=count))
        for _ in range(60):
            queue.schedule(1, 8)
