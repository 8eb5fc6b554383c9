"""Checks of a scheduler's queue: requests are aborted, preempted, and come again."""

from __future__ import annotations

from random import Random

import pytest

from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.scheduler_base import (
    AHEAD,
    ONE_TOKEN,
    SchedulingConformance,
    assert_all_end,
    for_each,
)
from nanovllm_kit.scheduler_compare import NOT_TOLD_ALONE, TWICE, assert_same_decisions
from nanovllm_kit.scheduler_watch import Watch
from nanovllm_kit.traffic import Traffic, drive, traffic

RETURNING = tuple("abcdef")
STRANGERS = tuple("ABCDEF")
QUEUES = 8
"""In which ids come again."""
BY_ID = (
    "Likely cause: what was known of an earlier request with the same id. An id may come again "
    "once its request has ended; arrival_index tells requests apart"
)


class SchedulerQueue(SchedulingConformance):
    """Who comes and goes."""

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_an_aborted_request_that_waits_is_forgotten(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """It is never scheduled, and those behind it go on."""
        harness = self.harness(plugin, Setting(max_num_seqs=1, steps_ahead=steps_ahead))
        for name in "abcd":
            harness.add(name, [ord(name) % 50] * 9)
        harness.step()
        waiting = [name for name in "abcd" if not harness.requests[name, 0].block_tables]
        assert len(waiting) == 3, "one row, and not one of four requests has it"
        harness.engine.abort(waiting[1])
        assert_all_end(harness)

    def test_an_id_may_come_again(self, plugin: PluginUnderTest) -> None:
        """Once its request has ended or was aborted, another may have it: it is a new request."""
        harness = self.harness(plugin, Setting(max_num_seqs=2))
        for length in (9, 30, 2):
            harness.add("again", [length] * length)
            harness.add("gone", [1] * length)
            harness.step()
            harness.engine.abort("gone")
            assert_all_end(harness)
            harness.requests.clear()
            harness.finished.clear()

    def test_the_same_ids_may_come_again_after_any_traffic(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Three rounds on one engine, with aborts and preemptions: each is as the first."""

        def ends(case: Traffic) -> None:
            harness = self.harness(plugin, case.setting)
            for _ in range(3):
                drive(harness, case.arrivals)
                harness.requests.clear()
                harness.finished.clear()

        for_each(traffic(), draws, ends, examples=12)

    def test_an_id_that_comes_again_is_served_as_a_fresh_one(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """A queue is served in the same order whether its ids were there before or others were."""
        seeds = [draws.getrandbits(64) for _ in range(QUEUES)]
        once, again, fresh = (
            [self._serve_after(plugin, earlier, Random(seed)) for seed in seeds]
            for earlier in (RETURNING, RETURNING, STRANGERS)
        )
        # First of all queues: dice differ here already, and are no matter of ids.
        for one, other in zip(once, again, strict=True):
            assert_same_decisions(one, other, TWICE, NOT_TOLD_ALONE)
        for one, other in zip(again, fresh, strict=True):
            runs = ("where some ids came again", "where all ids were fresh")
            assert_same_decisions(one, other, runs, BY_ID)

    def _serve_after(
        self, plugin: PluginUnderTest, earlier: tuple[str, ...], draws: Random
    ) -> Watch:
        """How a drawn queue was served in an engine in which `earlier` ids had come and gone."""
        watch = Watch(self.make_scheduler(plugin))
        setting = Setting(
            num_blocks=draws.randint(8, 14),
            max_num_seqs=draws.randint(1, 3),
            max_num_batched_tokens=draws.randint(8, 40),
            prefix_caching=False,
            steps_ahead=draws.randint(0, 2),
        )
        harness = self.harness_of(watch, setting)
        for name in earlier:
            _come_and_go(harness, name, draws)
        for past in (watch.decisions, watch.victims, watch.victim_steps):
            past.clear()
        names = [*RETURNING, *"ghijkl"]
        draws.shuffle(names)
        for name in names:
            answer = SamplingParams(
                temperature=0, max_tokens=draws.randint(1, 12), priority=draws.randint(-1, 1)
            )
            harness.add(name, [1] * draws.randint(1, 20), answer)
            for _ in range(draws.choice([0, 0, 0, 1, 4])):
                harness.step()
        assert_all_end(harness)
        return watch

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
        assert_all_end(harness)

    @pytest.mark.parametrize(("num_blocks", "windows"), [(14, (None,)), (25, (None, 6))])
    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_a_preempted_request_waits_again_and_ends(
        self,
        plugin: PluginUnderTest,
        steps_ahead: int,
        num_blocks: int,
        windows: tuple[int | None, ...],
    ) -> None:
        """Four answers outgrow the cache together; no token is lost, none computed twice."""
        setting = Setting(
            num_blocks=num_blocks,
            prefix_caching=False,
            steps_ahead=steps_ahead,
            cache_windows=windows,
        )
        harness = self.harness(plugin, setting)
        for name in "abcd":
            answer = SamplingParams(temperature=0, max_tokens=30)
            harness.add(name, [ord(name) % 50] * 8, answer, stream=name in "ac")
        assert_all_end(harness)
        computed = harness.engine.stats.output_tokens
        assert computed == 4 * 30, f"{computed} tokens were computed for 120 of output"

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_a_request_as_large_as_the_cache_ends(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """It takes every block and then the last one's last slot, beside preempted requests."""
        setting = Setting(num_blocks=8, max_model_len=33, steps_ahead=steps_ahead)
        harness = self.harness(plugin, setting)
        harness.add("small", [3] * 5)
        harness.add("whole", [1] * 20, SamplingParams(temperature=0, max_tokens=13))
        harness.add("more", [2] * 9)
        assert_all_end(harness)

    def test_a_cached_prefix_is_not_computed_again(self, plugin: PluginUnderTest) -> None:
        """Of a prompt that is cached up to its last block, only the rest is given out."""
        harness = self.harness(plugin, Setting(max_num_batched_tokens=4, steps_ahead=0))
        for name in "ab":
            harness.add(name, range(23), SamplingParams(temperature=0, max_tokens=2))
            assert_all_end(harness)
        assert harness.finished["b", 0].num_cached_tokens == 20


def _come_and_go(harness: Harness, name: str, draws: Random) -> None:
    """A request waits or runs, alone, so that its id decides nothing; it is aborted or ends."""
    harness.add(name, [1] * draws.randint(1, 20), ONE_TOKEN)
    steps = draws.choice([0, 1, None])
    if steps is not None:
        for _ in range(steps):
            harness.step()
        harness.engine.abort(name)
    assert_all_end(harness)
    harness.requests.clear()
    harness.finished.clear()
