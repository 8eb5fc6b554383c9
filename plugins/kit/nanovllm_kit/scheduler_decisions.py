"""Checks of a scheduler's decisions under any traffic: a rule at a time, then whether it ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from random import Random

import pytest
from hypothesis import strategies as st

from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.engine_harness import Setting
from nanovllm_kit.scheduler_base import AHEAD, ONE_TOKEN, SchedulingConformance, for_each
from nanovllm_kit.scheduler_compare import NOT_TOLD_ALONE, TWICE, assert_same_decisions
from nanovllm_kit.scheduler_views import hours_pass
from nanovllm_kit.scheduler_watch import (
    Rule,
    Watch,
    anything_goes,
    gives_real_work,
    keeps_the_blocks,
    keeps_the_budget,
    keeps_the_rows,
)
from nanovllm_kit.traffic import Traffic, drive, play, traffic

STEPS_TO_END = 1000
"""For a few short prompts; one token of one prompt a step would take a fifth of it."""
FEW_BLOCKS = Setting(
    num_blocks=10,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=40,
    max_model_len=512,
    prefix_caching=False,
)


class SchedulerDecisions(SchedulingConformance):
    """Every decision is one that the core can carry out, and depends on nothing else."""

    def _hold(self, plugin: PluginUnderTest, draws: Random, rule: Rule) -> None:
        __tracebackhide__ = True

        def keeps(case: Traffic) -> None:
            __tracebackhide__ = True
            self.run(plugin, case, rule)

        for_each(traffic(), draws, keeps)

    def test_the_token_budget_is_kept(self, plugin: PluginUnderTest, draws: Random) -> None:
        """Shares add up to no more than `token_budget`, after the prefix cache's part."""
        self._hold(plugin, draws, keeps_the_budget)

    def test_no_more_are_admitted_than_rows_are_free(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """`max_num_seqs` bounds who is resident, not who works in one step."""
        self._hold(plugin, draws, keeps_the_rows)

    def test_no_more_blocks_are_given_out_than_are_free(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Counted with `num_new_blocks`, which knows what is shared."""
        self._hold(plugin, draws, keeps_the_blocks)

    def test_only_work_that_is_there_is_given_out(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """To requests that wait or are unfinished, once a step, within what they have left."""
        self._hold(plugin, draws, gives_real_work)

    def test_a_victim_is_one_of_the_running(self, plugin: PluginUnderTest, draws: Random) -> None:
        """`choose_victim` names someone whose blocks can be taken."""

        def names_a_running_one(case: Traffic) -> None:
            for running, victim in self.run(plugin, case, anything_goes).victims:
                assert victim in running, f"choose_victim gave {victim!r}, no id of {running}"

        for_each(traffic(), draws, names_a_running_one)

    @pytest.mark.parametrize("steps_ahead", [0, 1, 3], ids=AHEAD)
    def test_prompts_that_do_not_fit_together_all_end(
        self, plugin: PluginUnderTest, steps_ahead: int
    ) -> None:
        """Eight prompts of six blocks in a cache of ten: what is begun can go on, none circles."""
        setting = replace(FEW_BLOCKS, steps_ahead=steps_ahead)
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
            f"preempted each other {stats.preemptions} times; begin a prompt only once the "
            "blocks for all of it are free (num_new_blocks, free_blocks)"
        )
        harness.check_all()

    def test_every_request_ends_with_the_tokens_that_its_ids_decide(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Requests arrive, are aborted, are preempted: nothing is lost, leaked or refused."""

        def ends(case: Traffic) -> None:
            drive(self.harness(plugin, case.setting), case.arrivals)

        for_each(traffic(), draws, ends)

    def test_the_same_traffic_is_decided_the_same_way(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Two runs agree in every share and every victim: no clock, no dice, no shared state."""

        def agrees(case: Traffic) -> None:
            __tracebackhide__ = True
            first = self.run(plugin, case, anything_goes)
            with hours_pass():
                second = self.run(plugin, case, anything_goes)
            assert_same_decisions(first, second, TWICE, NOT_TOLD_ALONE)

        for_each(traffic(), draws, agrees)

    def test_two_engines_do_not_disturb_each_other(
        self, plugin: PluginUnderTest, draws: Random
    ) -> None:
        """Step by step beside another engine whose requests have the same ids: equal decisions."""

        def agrees(cases: tuple[Traffic, Traffic]) -> None:
            __tracebackhide__ = True
            alone = [self.run(plugin, case, anything_goes) for case in cases]
            beside = [Watch(self.make_scheduler(plugin)) for _ in cases]
            steps = [
                play(self.harness_of(watch, case.setting), case.arrivals)
                for case, watch in zip(cases, beside, strict=True)
            ]
            for _ in zip_longest(*steps):
                pass
            for first, second in zip(alone, beside, strict=True):
                runs = ("alone", "beside another engine")
                assert_same_decisions(first, second, runs, NOT_TOLD_ALONE)

        for_each(st.tuples(traffic(), traffic()), draws, agrees, examples=25)
