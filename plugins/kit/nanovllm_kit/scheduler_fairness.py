"""Checks that no request starves: in endless traffic, long queues, long prompts, preemptions.

What arrives is drawn from the suite's seed, over the whole range that an engine may have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from nanovllm_core.engine import Request
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import RequestView
from nanovllm_kit.conformance import PluginUnderTest, full_level
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.scheduler_base import (
    ONE_TOKEN,
    SchedulingConformance,
    assert_all_end,
    log_uniform,
)
from nanovllm_kit.scheduler_turns import TurnWatch
from nanovllm_kit.scheduler_watch import ReadOnlyRequest

ENDLESS_SCENES = 20
LONGEST_BOUND = 200
"""Steps that the suite waits for a declared bound; for a longer one it skips."""
MOST_ARRIVALS = 300
"""While one is watched; a shorter prompt is watched where its bound is shorter."""
LONGEST_PROMPT = 131_072
LONGEST_QUEUE = 1_500
MOST_PREEMPTIONS = 30
COMPUTED = 3
"""Times that a request which may pass is computed: blocks are short, so some are preempted."""
CALM = 100
"""Steps within which a request begins while rows, blocks and budget are free for all."""


@dataclass(frozen=True)
class Endless:
    """An engine that is never idle: `per_step` requests of `length` tokens arrive in every step."""

    setting: Setting
    length: int
    answer: int
    """Tokens that each of them gives: with more than one, rows and blocks come free one by one."""
    per_step: int
    priorities: tuple[int, ...]
    """The others are as urgent as the watched request (0) or more."""
    before: int
    """Steps of arrivals before the watched request."""
    queue: int
    """Requests that came at once, before all."""
    watched: int
    """Tokens of the watched prompt at most; fewer where its bound is too long to wait for."""

    def steps_of_one(self) -> int:
        """Steps in which one of the others has been served, even if no two go on together.

        A long prompt takes many steps of a small budget, of which each other row may take a token.
        """
        sizes = self.setting
        budget = sizes.max_num_batched_tokens - (sizes.max_num_seqs - 1)
        chunks = -(-(self.length + self.answer) // budget)
        return chunks + self.answer + sizes.steps_ahead


def draw_endless(draws: Random) -> Endless:
    """Few rows or few tokens a step or few blocks, so that somebody always waits."""
    rows = log_uniform(draws, 1, 16)
    length = log_uniform(draws, 1, 40)
    answer = draws.choice([1, 1, log_uniform(draws, 2, 12)])
    by_rows = draws.random() < 0.6
    budget = rows + (rows * length if by_rows else draws.randint(1, 40))
    per_step = rows + draws.randint(0, 2) if by_rows else budget // length + 1
    watched = log_uniform(draws, 1, 3_000)
    block_size = draws.choice([1, 4, 16, 64])
    longest = -(-max(watched + 1, length + answer) // block_size)
    few = longest + rows * -(-(length + answer) // block_size) // 2
    return Endless(
        Setting(
            num_blocks=draws.choice([few, few + rows * longest]),
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=max(watched, length) + answer,
            prefix_caching=False,
            steps_ahead=draws.randint(0, 3),
        ),
        length=length,
        answer=answer,
        per_step=per_step,
        priorities=draws.choice([(0,), (-1,), (-3, -1, 0)]),
        before=draws.randint(0, 3),
        queue=draws.choice([0, 0, log_uniform(draws, 1, 20 * rows)]),
        watched=watched,
    )


def draw_short_of_blocks(draws: Random) -> Endless:
    """Rows and tokens are plenty, and the watched prompt fits only where all others have ended."""
    rows = draws.randint(4, 16)
    length, answer = draws.randint(1, 8), draws.randint(3, 12)
    block_size = draws.choice([1, 4])
    watched = draws.randint(20 * block_size, 200)
    return Endless(
        Setting(
            num_blocks=-(-(watched + answer) // block_size),
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=watched + rows * length,
            max_model_len=watched + answer,
            prefix_caching=False,
            steps_ahead=draws.randint(0, 3),
        ),
        length=length,
        answer=answer,
        per_step=draws.randint(1, 2),
        priorities=(0,),
        before=draws.randint(1, 3),
        queue=0,
        watched=watched,
    )


def draw_fresh(draws: Random) -> Endless:
    """Every row goes to the request of one token that has just come, for as long as it may.

    So many arrive as are admitted: none of them waits, and the last that passes is the latest.
    """
    rows, watched = draws.randint(1, 3), log_uniform(draws, 50, 3_000)
    return Endless(
        Setting(
            num_blocks=watched + 2 * rows,
            block_size=1,
            max_num_seqs=rows,
            max_num_batched_tokens=watched + rows,
            max_model_len=watched + 1,
            prefix_caching=False,
            steps_ahead=0,
        ),
        length=1,
        answer=1,
        per_step=rows,
        priorities=draws.choice([(0,), (-3,)]),
        before=1,
        queue=0,
        watched=watched,
    )


DRAWN = (draw_endless, draw_fresh, draw_endless, draw_short_of_blocks)


@dataclass
class Others:
    """Requests without end, for `answer` tokens each; each has a number."""

    harness: Harness
    draws: Random
    priorities: tuple[int, ...] = (0,)
    answer: int = 1
    added: int = 0

    def arrive(self, count: int, length: int) -> None:
        for _ in range(count):
            urgency = self.draws.choice(self.priorities)
            params = replace(ONE_TOKEN, priority=urgency, max_tokens=self.answer)
            self.harness.add(f"other {self.added}", [2] * length, params)
            self.added += 1


class SchedulerFairness(SchedulingConformance):
    """No request starves."""

    def turns(
        self,
        plugin: PluginUnderTest,
        setting: Setting,
        bound: Callable[[RequestView], float],
        draws: Random,
    ) -> Harness:
        """An engine of any age, whose scheduler is held to its bound at every step."""
        watch = TurnWatch(self.make_scheduler(plugin), bound=bound)
        harness = self.harness_of(watch, setting, debug=False)
        harness.grow_old(_any_age(draws), _any_age(draws))
        return harness

    def test_no_request_is_passed_over_for_longer_than_declared(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Under endless arrivals, as urgent or more, who is admitted first came within the bound.

        An admission before a request that waits is of one that came earlier, or at most so many
        steps later as the plugin declares for it.
        """
        bound = self.declared_bound(plugin)
        waited = 0
        for number in range(ENDLESS_SCENES):
            scene = DRAWN[number % len(DRAWN)](draws)
            waited += self._watch_one(plugin, scene, bound, draws)
        if not waited:
            pytest.skip(
                f"{plugin.spec.name} promises nothing with {plugin.options!r} within "
                f"{LONGEST_BOUND} steps; state `options` with a bound of at most that"
            )

    def _watch_one(
        self,
        plugin: PluginUnderTest,
        scene: Endless,
        bound: Callable[[RequestView], float],
        draws: Random,
    ) -> bool:
        """Play a scene until its watched request is admitted; False where it cannot be awaited."""
        harness = self.turns(plugin, scene.setting, bound, draws)
        others = Others(harness, draws, scene.priorities, scene.answer)
        others.arrive(scene.queue, scene.length)
        for _ in range(scene.before):
            others.arrive(scene.per_step, scene.length)
            harness.step()
        request, declared = _add_watched(harness, scene, bound)
        if declared > LONGEST_BOUND:
            return False
        # All who may pass, one after the other: how many go on together depends on the blocks. One
        # that passes too late is found by `turns`, long before.
        passing = scene.queue + scene.per_step * (int(declared) + scene.before + 2)
        allowed = COMPUTED * passing * scene.steps_of_one() + CALM
        for _ in range(allowed):
            if request.wait_steps is not None:
                return True
            others.arrive(scene.per_step, scene.length)
            harness.step()
        raise AssertionError(
            f"starved: not admitted in {allowed} steps, in which the {passing} requests that may "
            f"pass are served one by one; the declared bound is {declared:g} steps; {scene}"
        )

    def test_a_long_queue_is_served_to_its_end(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """However many wait, in bursts or one by one, with aborts: all end, and keep the bound."""
        self._serve_queues(plugin, draws, LONGEST_QUEUE)

    @full_level("a minute: 15,000 requests wait")
    def test_a_queue_ten_times_as_long_is_served_to_its_end(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """As the one before."""
        self._serve_queues(plugin, draws, 10 * LONGEST_QUEUE)

    def _serve_queues(self, plugin: PluginUnderTest, draws: Random, longest: int) -> None:
        bound = self.bound(plugin)
        for first, per_step, count in (
            (0, 1, 400),
            (0, draws.randint(longest // 30, longest // 5), longest),
            (longest - 200, draws.randint(10, 50), longest),
        ):
            rows = log_uniform(draws, 8 + count // 200, 16 + count // 30)
            setting = Setting(
                num_blocks=draws.randint(4 * rows, 12 * rows),
                block_size=4,
                max_num_seqs=rows,
                max_num_batched_tokens=draws.randint(20 * rows, 40 * rows),
                max_model_len=44,
                prefix_caching=False,
                steps_ahead=draws.randint(0, 2),
            )
            harness = self.turns(plugin, setting, bound, draws)
            others = Others(harness, draws, (0, 0, 1, -1))
            others.arrive(first, draws.randint(1, 40))
            while others.added < count:
                for _ in range(per_step):
                    others.arrive(1, draws.randint(1, 40))
                for _ in range(draws.choice([0, 0, 0, 1, 2])):
                    harness.engine.abort(f"other {draws.randrange(others.added)}")
                harness.step()
            assert_all_end(harness)

    def test_a_prompt_of_any_length_is_served(self, plugin: PluginUnderTest, draws: Random) -> None:
        """From one token to as many as the engine takes, among others that go on arriving."""
        self._serve_prompts(plugin, draws, LONGEST_PROMPT)

    @full_level("a minute: prompts of a million tokens")
    def test_a_prompt_eight_times_as_long_is_served(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """As the one before."""
        self._serve_prompts(plugin, draws, 8 * LONGEST_PROMPT)

    def _serve_prompts(self, plugin: PluginUnderTest, draws: Random, longest: int) -> None:
        bound = self.bound(plugin)
        for most in (longest, log_uniform(draws, 100, longest)):
            lengths = [most, *(log_uniform(draws, 1, most) for _ in range(4))]
            draws.shuffle(lengths)
            rows = draws.randint(1, 4)
            setting = Setting(
                num_blocks=most // 64 + 1 + draws.choice([0, 4, most // 64]),
                block_size=64,
                max_num_seqs=rows,
                max_num_batched_tokens=log_uniform(draws, most // 50 + 8, most + 8),
                max_model_len=most + 1,
                prefix_caching=draws.random() < 0.5,
                steps_ahead=draws.randint(0, 2),
            )
            harness = self.turns(plugin, setting, bound, draws)
            others = Others(harness, draws)
            for number, length in enumerate(lengths):
                others.arrive(rows, draws.randint(1, 9))
                harness.add(f"prompt {number}", [number] * length, ONE_TOKEN)
                for _ in range(draws.randint(3, 8)):
                    harness.step()
                    others.arrive(rows, draws.randint(1, 9))
            assert_all_end(harness)

    def test_a_preempted_request_is_served_again(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """However often: within its bound, and while there is room for all, beside those that run.

        Blocks run out and are free again, time after time; between, short requests come and end.
        """
        for between in (0, 5, 20):
            self._press(plugin, draws, runners=draws.randint(2, 4), between=between)

    def _press(self, plugin: PluginUnderTest, draws: Random, runners: int, between: int) -> None:
        """`between` steps of calm at most between one preemption and the next."""
        setting = Setting(
            num_blocks=8_192,
            block_size=1,
            max_num_seqs=runners + draws.randint(1, 3),
            max_num_batched_tokens=draws.randint(400, 2_000),
            max_model_len=1_024,
            prefix_caching=between == 5,
            steps_ahead=draws.randint(0, 3),
        )
        harness = self.turns(plugin, setting, self.bound(plugin), draws)
        others = Others(harness, draws)
        answer = SamplingParams(temperature=0, max_tokens=960)
        long = [
            harness.add(f"long {i}", [i] * draws.randint(1, 60), answer)[0] for i in range(runners)
        ]
        _calm(harness, long, len(long))
        at_once = _running(long)
        for preempted in range(MOST_PREEMPTIONS):
            for _ in range(draws.randint(0, between)):
                harness.step()
            if not _squeeze(harness, long):
                break
            others.arrive(draws.choice([0, 0, 1, 12]), draws.randint(1, 9))
            _calm(harness, long, at_once)
            if harness.finished.keys() & {(request.request_id, 0) for request in long}:
                break
            assert _running(long) >= at_once, (
                f"requests were preempted {preempted + 1} times, and {_running(long)} of {at_once} "
                f"run again {CALM} steps after the last; rows, blocks and budget are free for all"
            )


def _add_watched(
    harness: Harness, scene: Endless, bound: Callable[[RequestView], float]
) -> tuple[Request, float]:
    """Add the watched prompt, or a shorter one whose bound can be waited for."""
    length, longer = scene.watched, math.inf
    for attempt in itertools.count():
        [request] = harness.add(f"watched {attempt}", [1] * length, ONE_TOKEN)
        declared = bound(ReadOnlyRequest(request))
        # Infinity, and a bound that does not depend on the length, stay as they are.
        if declared * scene.per_step <= MOST_ARRIVALS or length == 1 or declared == longer:
            break
        harness.engine.abort(request.request_id)
        length, longer = length // 2, declared
    return request, declared


def _any_age(draws: Random) -> int:
    """A count of steps or requests: of a new engine, of an old one, or short of a power of two."""
    wraps = (1 << draws.choice([15, 16, 31, 32])) - draws.randint(1, 60)
    return draws.choice([0, log_uniform(draws, 1, 2**40), wraps, wraps])


def _running(requests: list[Request]) -> int:
    return sum(request.row >= 0 for request in requests)


def _calm(harness: Harness, long: list[Request], at_once: int) -> None:
    """Step until `at_once` of `long` run and no other request is left; CALM steps at most."""
    for _ in range(CALM):
        stats = harness.engine.stats
        if _running(long) >= at_once and stats.running + stats.waiting == len(long):
            break
        harness.step()


def _squeeze(harness: Harness, long: list[Request]) -> bool:
    """Take all free blocks until a running request is preempted; False if that cannot be."""
    before = harness.engine.stats.preemptions
    held: list[int] = []
    while harness.engine.stats.preemptions == before and _running(long) > 1:
        held += harness.take_free_blocks()
        harness.step()
    harness.give_back(held)
    return harness.engine.stats.preemptions > before
