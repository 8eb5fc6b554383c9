"""Classes, the order inside them, ageing, and who is preempted: on the real engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from nanovllm_core.api import SamplingParams
from nanovllm_example_scheduler_priority.plugin import (
    PriorityOptions,
    max_overtaking_steps,
)
from nanovllm_example_scheduler_priority.scheduler import PriorityScheduler
from nanovllm_kit.engine_harness import Harness, Setting


def request(priority: int, max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, priority=priority)


def harness(patience: int, **setting: int | bool) -> Harness:
    sizes: dict[str, Any] = {"max_num_seqs": 1, "steps_ahead": 0, "prefix_caching": False}
    scheduler = PriorityScheduler(PriorityOptions(patience=patience))
    return Harness(Setting(**{**sizes, **setting}), scheduler)


def order_of_ends(engine: Harness) -> list[str]:
    engine.run()
    engine.check_all()
    return [output.request_id for output in engine.outputs if output.finished]


def test_a_lower_number_is_served_first_and_within_a_class_who_came_first() -> None:
    """Negative numbers are urgent; who says nothing has 0."""
    engine = harness(patience=1000)
    for name, priority in (("late", 7), ("c", 1), ("a", -2), ("d", 1), ("b", -2)):
        engine.add(name, [3] * 5, request(priority))
    engine.add("plain", [3] * 5)
    assert order_of_ends(engine) == ["a", "b", "plain", "c", "d", "late"]


def test_an_urgent_prompt_overtakes_one_that_is_half_computed() -> None:
    """The long prompt waits with its blocks; its answer is what it would have been alone."""
    engine = harness(patience=1000, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add("long", [1] * 40, request(5))
    engine.step()
    engine.step()
    engine.add("urgent", [2] * 20, request(0))
    assert order_of_ends(engine) == ["urgent", "long"]


def test_waiting_makes_up_for_a_class() -> None:
    """Urgent requests arrive without end; the other one is served as soon as it is overdue."""
    patience = 20
    engine = harness(patience)
    [slow] = engine.add("slow", [1] * 8, request(1000))
    for number in itertools.count():
        if slow.wait_steps is not None:
            break
        assert number < 3 * patience, "starved"
        engine.add(f"urgent {number}", [2] * 8, request(-1000))
        engine.step()
    assert patience <= slow.wait_steps <= patience + 1


@given(
    classes=st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    patience=st.integers(0, 30),
    priority=st.integers(-3, 10),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_request_is_passed_over_by_one_that_came_later_than_the_bound(
    classes: list[int], patience: int, priority: int
) -> None:
    """Whatever classes keep arriving, two a step, for one row."""
    engine = harness(patience)
    [watched] = engine.add("watched", [1] * 8, request(priority))
    arrived = []
    classes_of_arrivals = itertools.cycle(classes)
    for number in range(2 * patience + 10):
        if watched.wait_steps is not None:
            break
        for name in (f"{number}a", f"{number}b"):
            arrived += engine.add(name, [2] * 8, request(next(classes_of_arrivals)))
        engine.step()
    assert watched.wait_steps is not None, "starved"
    bound = max_overtaking_steps(PriorityOptions(patience=patience), watched)
    for other in arrived:
        if other.wait_steps is None:
            continue
        if other.arrival_step + other.wait_steps < watched.arrival_step + watched.wait_steps:
            assert other.arrival_step - watched.arrival_step <= bound


def test_the_last_in_turn_is_preempted() -> None:
    """The highest number, and of these the newest."""
    engine = harness(patience=1000, max_num_seqs=3)
    requests = [
        engine.add(name, [1] * 4, request(priority))[0]
        for name, priority in (("a", 2), ("b", 5), ("c", 5), ("d", -1))
    ]
    assert PriorityScheduler(PriorityOptions()).choose_victim(requests) == "c"
    order_of_ends(engine)


def test_a_big_request_is_not_passed_over_for_want_of_blocks() -> None:
    """It is first in turn and does not fit yet; a small one behind it must not take its blocks."""
    engine = harness(patience=1000, max_num_seqs=3, num_blocks=16, block_size=4)
    engine.add("runs", [1] * 20, request(0, max_tokens=20))
    engine.step()
    engine.add("big", [2] * 48, request(0))
    engine.add("small", [3] * 4, request(0))
    assert order_of_ends(engine) == ["runs", "big", "small"]


def test_patience_must_not_be_negative() -> None:
    with pytest.raises(ValidationError, match="patience"):
        PriorityOptions(patience=-1)
