"""Longest answer first: the order, how long it passes over a request, and the steps it fills."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest
from pydantic import ValidationError

from nanovllm_core.api import SamplingParams
from nanovllm_core.engine import TokenBudgetScheduler
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_scheduler_lpt.plugin import LptOptions, nanovllm_schedulers
from nanovllm_scheduler_lpt.policy import LptPolicy

SETTING = Setting(
    num_blocks=200, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=80, steps_ahead=0
)


def make_harness(setting: Setting = SETTING, **options: float) -> Harness:
    return Harness(setting, TokenBudgetScheduler(LptPolicy(LptOptions(**options))))


def answer(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def one_at_a_time(**options: float) -> Harness:
    return make_harness(Setting(max_num_seqs=1, steps_ahead=0), **options)


def test_the_longest_answer_is_served_first_whatever_the_prompts() -> None:
    """Answers of one length go in the order of arrival."""
    harness = one_at_a_time()
    requests = {
        name: harness.add(name, [1] * prompt, answer(outputs))[0]
        for name, prompt, outputs in (("c", 30, 5), ("a", 2, 20), ("d", 40, 3), ("b", 9, 5))
    }
    harness.run()
    waits = {name: request.wait_steps for name, request in requests.items()}
    assert sorted(waits, key=lambda name: waits[name] or 0) == ["a", "c", "b", "d"]


@pytest.mark.parametrize(("ageing", "passed_by"), [(1.0, 6), (0.5, 12), (4.0, 2)])
def test_a_request_is_passed_over_by_no_one_that_arrives_later_than_the_bound(
    ageing: float, passed_by: int
) -> None:
    """Of m - n output tokens more, within (m - n) / ageing steps; a longer one in every step."""
    harness = one_at_a_time(ageing=ageing)
    [watched] = harness.add("watched", [1], answer(2))
    later = []
    while watched.wait_steps is None:
        arrived = harness.engine.stats.steps
        [request] = harness.add(f"{arrived}", [1], answer(8))
        later.append((arrived, request))
        harness.step()
    passed = [arrived for arrived, request in later if request.wait_steps is not None]
    assert passed
    assert max(passed) <= ceil((8 - 2) / ageing) == passed_by
    harness.run()


def test_without_ageing_endless_long_answers_starve_a_short_one() -> None:
    harness = one_at_a_time(ageing=0)
    [watched] = harness.add("watched", [1], answer(6))
    for arrived in range(300):
        harness.add(f"{arrived}", [1], answer(20))
        harness.step()
    assert watched.wait_steps is None


def test_in_steps_of_one_size_a_batch_is_done_sooner_than_in_order_of_arrival() -> None:
    """Prompts and answers are drawn; the long answers do not end alone."""
    draws = Random(5)
    lengths = [(draws.randint(1, 30), draws.randint(1, 40)) for _ in range(24)]
    steps = []
    for scheduler in (TokenBudgetScheduler(LptPolicy(LptOptions())), None):
        harness = Harness(SETTING, scheduler)
        for number, (prompt, outputs) in enumerate(lengths):
            harness.add(f"{number}", [number] * prompt, answer(outputs))
        harness.run()
        harness.check_all()
        steps.append(harness.engine.stats.steps)
    fewest = ceil(sum(outputs for _, outputs in lengths) / SETTING.max_num_seqs)
    assert fewest <= steps[0] < 0.85 * steps[1]


def test_no_request_is_preempted_unless_less_is_reserved() -> None:
    """Blocks for four whole sequences, and sixteen that each begin small."""
    preemptions = []
    for reserve in (1.0, 0.0):
        setting = Setting(num_blocks=40, max_num_seqs=16, max_model_len=40)
        harness = make_harness(setting, reserve=reserve)
        for number in range(16):
            harness.add(f"{number}", [number] * 4, answer(36))
        harness.run()
        harness.check_all()
        preemptions.append(harness.engine.stats.preemptions)
    assert preemptions[0] == 0 < preemptions[1]


@pytest.mark.parametrize(
    "options", [{"ageing": -1}, {"ageing": float("nan")}, {"reserve": -0.1}, {"reserve": 1.1}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        LptOptions(**options)


def test_the_spec_names_the_policy() -> None:
    (spec,) = nanovllm_schedulers()
    assert (spec.name, spec.level, spec.options) == ("lpt", "policy", LptOptions)
    assert spec.impl == f"{LptPolicy.__module__}:{LptPolicy.__name__}"
