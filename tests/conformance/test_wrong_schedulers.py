"""Bugs that a stranger planted, and more like them: the suites' default level catches each."""

from __future__ import annotations

import random
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_core.errors import PluginFailedError, SchedulerError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_kit import (
    PluginUnderTest,
    SchedulerConformance,
    SchedulingPolicyConformance,
)
from nanovllm_kit.engine_harness import Harness, Progress, Setting
from nanovllm_kit.scheduler_fairness import Endless

from . import wrong_schedulers as wrong

PREEMPTED = "test_a_preempted_request_is_served_again"
LONG_QUEUE = "test_a_long_queue_is_served_to_its_end"
LONG_PROMPT = "test_a_prompt_of_any_length_is_served"
WORK = "test_the_work_of_a_step_grows_no_faster_than_a_sort"
LEFT = "test_those_who_left_are_no_work"
PROGRESS = "test_an_admitted_prompt_is_finished_whatever_arrives"
AGAIN = "test_an_id_that_comes_again_is_served_as_a_fresh_one"
SAME = "test_the_same_traffic_is_decided_the_same_way"
BESIDE = "test_two_engines_do_not_disturb_each_other"
KEPT = "test_nothing_is_kept_of_requests_that_ended"
READ_OFTEN = "test_a_key_is_the_same_however_often_it_is_read"
KEYS_BOUND = "test_keys_keep_the_declared_bound"
FAIRNESS = (
    "test_no_request_is_passed_over_for_longer_than_declared",
    PREEMPTED,
    LONG_QUEUE,
    LONG_PROMPT,
)


def plugin(impl: type, promises: bool = True) -> PluginUnderTest:
    """A plugin that promises the order of arrival, or nothing."""
    spec = SchedulerSpec(
        name="wrong",
        impl=f"{impl.__module__}:{impl.__name__}",
        contract=1,
        level="policy" if issubclass(impl, wrong.First) else "scheduler",
        max_overtaking_steps=(lambda _options, _request: 0) if promises else None,
    )
    return PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")


def run(check: str, impl: type, promises: bool = True, seed: int = 0) -> None:
    """One check of the suite of its level."""
    is_policy = issubclass(impl, wrong.First)
    suite = SchedulingPolicyConformance() if is_policy else SchedulerConformance()
    getattr(suite, check)(plugin(impl, promises), Random(seed))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("impl", "check"),
    [
        (wrong.AloneAfterTwo, PREEMPTED),
        (wrong.NeverAfterFive, PREEMPTED),
        (wrong.OnePreemptionTooMany, PREEMPTED),
        (wrong.NewestOfMany, LONG_QUEUE),
        (wrong.NewestFirstOfMany, LONG_QUEUE),
        (wrong.ShortOnly, LONG_PROMPT),
        (wrong.LongLast, LONG_PROMPT),
        (wrong.Squared, WORK),
        (wrong.SquaredInBuiltIns, WORK),
        (wrong.Cubed, WORK),
        (wrong.WalksByIndex, WORK),
        (wrong.SquaredVictim, WORK),
        (wrong.SortsAtEachArrival, WORK),
        (wrong.RemembersAll, LEFT),
        (wrong.OneQueueForAll, BESIDE),
        (wrong.OneTurnForAll, BESIDE),
        (wrong.OneOrderForAll, BESIDE),
        (wrong.VictimByDice, SAME),
        (wrong.VictimByDice, BESIDE),
        (wrong.RemembersSteps, AGAIN),
        (wrong.RemembersIds, AGAIN),
        (wrong.BegunWhileNoneDecodes, PROGRESS),
        (wrong.BegunLast, PROGRESS),
        (wrong.BegunWhileNoneWaits, PROGRESS),
        (wrong.KeepsTheServed, KEPT),
        (wrong.KeepsKeys, KEPT),
        (wrong.KeepsInTheModule, KEPT),
        (wrong.KeepsInACache, KEPT),
        (wrong.KeepsInAClosure, KEPT),
        (wrong.LastAfterTwo, READ_OFTEN),
        (wrong.LastAfterTwo, PREEMPTED),
        (wrong.LastAfterManyOutputs, KEYS_BOUND),
        (wrong.LastAfterManyOutputs, PREEMPTED),
        (wrong.NewestAfterMany, READ_OFTEN),
        (wrong.NewestAfterMany, LONG_QUEUE),
        (wrong.LongNever, KEYS_BOUND),
        (wrong.LongNever, LONG_PROMPT),
        (wrong.SquaredKey, WORK),
        (wrong.CubedKey, WORK),
        (wrong.ListKey, WORK),
    ],
)
def test_a_planted_bug_is_caught(impl: type, check: str, seed: int) -> None:
    """By the check that is about it, whatever the seed."""
    with pytest.raises((AssertionError, SchedulerError, PluginFailedError)):
        run(check, impl, seed=seed)


@pytest.mark.parametrize("bound", [15, 20, 22])
def test_a_bound_that_is_a_step_too_low_is_caught(bound: int) -> None:
    """A whole scheduler that ages: a request is passed over for 23 steps at most."""
    planted = plugin(wrong.Ageing)
    spec = replace(planted.spec, max_overtaking_steps=lambda _options, _request: bound)
    one = PluginUnderTest(spec, NoOptions(), "nanovllm_core.registry.builtins")
    with pytest.raises(AssertionError, match=f"the declared bound is {bound} steps"):
        getattr(SchedulerConformance(), FAIRNESS[0])(one, Random(0))


@pytest.mark.parametrize(
    ("impl", "check"),
    [
        (wrong.AloneAfterTwo, PREEMPTED),
        (wrong.NeverAfterFive, PREEMPTED),
        (wrong.ShortOnly, LONG_PROMPT),
        (wrong.LastAfterTwo, READ_OFTEN),
        (wrong.NewestAfterMany, READ_OFTEN),
    ],
)
def test_a_plugin_that_promises_no_order_is_held_to_serve_all(impl: type, check: str) -> None:
    """Bugs that are none of the order are caught where nothing is declared."""
    with pytest.raises((AssertionError, SchedulerError)):
        run(check, impl, promises=False)


@pytest.mark.parametrize("check", [*FAIRNESS, PROGRESS, AGAIN, WORK, LEFT, BESIDE, KEPT])
def test_what_the_bugs_are_planted_in_passes(check: str) -> None:
    run(check, wrong.InOrder)


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_competitors_may_take_many_steps_each(steps_ahead: int) -> None:
    """23 tokens at 2 a step are 12 steps for each of the 60 that may pass the watched request."""
    sizes = Setting(
        num_blocks=62,
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        max_model_len=236,
        prefix_caching=False,
        steps_ahead=steps_ahead,
    )
    scene = Endless(
        sizes, length=23, answer=1, per_step=1, priorities=(0,), before=0, queue=0, watched=235
    )
    suite = SchedulingPolicyConformance()
    one = plugin(wrong.ShortFirst)
    assert suite._watch_one(one, scene, lambda r: (r.num_tokens - 1) / 4, Random(0))


@pytest.mark.parametrize("seed", [8, 9, 11])
def test_a_policy_whose_whole_number_keys_tie_passes(seed: int) -> None:
    """A heap drops an aborted request with a dozen comparisons of keys, each up to four steps."""
    run(LEFT, wrong.ByClass, promises=False, seed=seed)


@pytest.mark.parametrize("check", [*FAIRNESS[1:], PROGRESS, AGAIN, WORK, LEFT, KEPT])
@pytest.mark.parametrize(
    "impl",
    [
        wrong.FairShare,
        pytest.param(wrong.LastInFirstOut, marks=pytest.mark.slow),
        pytest.param(wrong.Shuffled, marks=pytest.mark.slow),
        pytest.param(wrong.TwoAtOnce, marks=pytest.mark.slow),
        pytest.param(wrong.LeastDone, marks=pytest.mark.slow),
        pytest.param(wrong.KeepsAHeap, marks=pytest.mark.slow),
    ],
)
def test_right_schedulers_of_other_kinds_pass(impl: type, check: str) -> None:
    """Fair shares, the newest first, dice, quotas: by what they declare, which is nothing."""
    run(check, impl, promises=False)


@pytest.mark.slow
def test_a_scheduler_of_small_chunks_is_not_called_endless() -> None:
    """5,100 steps of 16 tokens each: every one of them is progress."""
    setting = Setting(num_blocks=1500, block_size=64, max_model_len=90_000, steps_ahead=0)
    harness = Harness(setting, wrong.SmallChunks(NoOptions()), debug=False)
    harness.add("long", [1] * 81_600, SamplingParams(temperature=0, max_tokens=1))
    harness.run()
    harness.check_all()


def test_circles_without_progress_are_told_from_small_steps() -> None:
    """A prompt that is computed again and again gets no further; so do ones that stand still."""
    request: Any = SimpleNamespace(num_scheduled=0, max_length=64)
    progress = Progress({("one", 0): request})
    # Two looks with something new, then six without: more than MAX_LOOKS, and 64 steps more.
    furthest = []
    for done in (16, 32, 16, 32, 8, 32, 0, 8):
        request.num_scheduled = done
        furthest.append(progress.look())
    assert furthest == [True] * 7 + [False]
    assert progress.since == 6000


def test_an_engine_that_is_starved_says_whose_fault_it_is() -> None:
    """24 requests in 17 blocks are preempted so often that none is served: a typed error."""
    setting = Setting(num_blocks=17, block_size=4, max_num_seqs=24, prefix_caching=False)
    harness = Harness(setting, wrong.NeverAfterFive(NoOptions()))
    for i in range(24):
        harness.add(f"r{i}", [i] * 4, SamplingParams(temperature=0, max_tokens=60))
    with pytest.raises(SchedulerError, match=r"^NeverAfterFive scheduled nothing while nothing"):
        harness.run()


@pytest.mark.parametrize(
    ("check", "runs"),
    [(SAME, ("the first time", "the second time")), (BESIDE, ("alone", "beside another engine"))],
)
def test_a_decision_by_dice_is_shown_with_its_likely_causes(
    check: str, runs: tuple[str, str]
) -> None:
    """The step, what was decided in each of the two runs, and what to look for."""
    one, other = runs
    parted = rf"^after the decision of step \d+: {one}, it preempted '\S+' of .*; {other}, it "
    causes = r"state that instances share .* a clock, on dice, or on the order of hashes"
    with pytest.raises(AssertionError, match=f"{parted}(?s:.*){causes}"):
        run(check, wrong.VictimByDice)


def test_a_decision_by_shared_state_is_shown_with_its_likely_causes() -> None:
    """Shares too, and where hypothesis cannot repeat the failure, since the state has moved on."""
    for seed in range(4):
        message = r"^step \d+: alone, it gave .*; beside another engine, it .*Likely causes"
        with pytest.raises(AssertionError, match=message):
            run(BESIDE, wrong.OneOrderForAll, seed=seed)


@pytest.mark.parametrize("impl", [wrong.RemembersSteps, wrong.RemembersIds])
def test_an_id_that_is_remembered_is_shown_with_the_remedy(impl: type) -> None:
    """The failure names the step, both decisions, and what identifies a request."""
    with pytest.raises(AssertionError, match=r"^step \d+: .*fresh, it gave .*arrival_index"):
        run(AGAIN, impl)


def test_dice_are_not_taken_for_an_id_that_is_remembered() -> None:
    """The check of ids finds them too, in two runs of the same ids."""
    random.seed(0)  # of the process, which hypothesis does not seed for this check
    with pytest.raises(AssertionError, match=r": the first time, it preempted .* on dice"):
        run(AGAIN, wrong.VictimByDice)


def test_a_failure_says_how_much_work_was_allowed() -> None:
    """With the number waiting, the limit and the remedy."""
    message = r"schedule\(\) with [\d]+ requests took more than [\d,]+ steps of work; look at each"
    with pytest.raises(AssertionError, match=message):
        run(WORK, wrong.Squared)
