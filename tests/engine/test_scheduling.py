"""The default scheduler's order, and what the core does with a scheduler's decisions."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import EngineClosedError, PluginFailedError, SchedulerError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
    SchedulingPolicy,
)
from nanovllm_kit.engine_harness import Harness, Setting


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


class Reserving(FcfsPolicy):
    """Blocks for a share of each answer."""

    def __init__(self, reserve: Any) -> None:
        self.reserve = reserve


class Scripted(Scheduler):
    """Decides what the test says."""

    def __init__(
        self,
        decide: Callable[[SchedulerState], Sequence[PrefillShare]],
        victim: str = "",
    ) -> None:
        self.decide = decide
        self.victim = victim

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return self.decide(state)

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return self.victim or running[-1].request_id


def everything(state: SchedulerState) -> list[PrefillShare]:
    """Every prompt in full, whatever it costs."""
    return [PrefillShare(request.request_id, request.num_tokens) for request in state.waiting]


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (PrefillShare("nobody", 3), "scheduled 'nobody', which neither waits"),
        (PrefillShare("a", 0), "gave 'a' 0 tokens; it has 10"),
        (PrefillShare("a", -2), "gave 'a' -2 tokens; it has 10"),
        (PrefillShare("a", 11), "gave 'a' 11 tokens; it has 10"),
        (PrefillShare("a", 3.0), "gave 'a' 3.0 tokens; .* a whole number from 1 to 10"),  # type: ignore[arg-type]
        (PrefillShare(["a"], 3), "scheduled .'a'., which neither waits"),  # type: ignore[arg-type]
    ],
)
def test_a_share_that_cannot_be_is_refused(share: PrefillShare, message: str) -> None:
    """Unknown ids and sizes out of range end the engine with the scheduler's name."""
    harness = Harness(scheduler=Scripted(lambda _: [share]))
    harness.add("a", range(10))
    with pytest.raises(SchedulerError, match=f"Scripted {message}"):
        harness.step()
    with pytest.raises(EngineClosedError, match="ended with SchedulerError"):
        harness.step()
    with pytest.raises(EngineClosedError, match="make a new one"):
        harness.add("b", range(10))


def test_an_error_that_a_scheduler_raises_names_it_and_the_line() -> None:
    """Of every method that the engine calls; the scheduler's own error is the cause."""

    def fail(_: object) -> Any:
        return {}["share"]

    harness = Harness(scheduler=Scripted(fail))
    harness.add("a", range(10))
    with pytest.raises(
        PluginFailedError, match=r"Scripted: schedule failed: KeyError: 'share' \(test_scheduling"
    ) as caught:
        harness.step()
    assert isinstance(caught.value.__cause__, KeyError)

    class Deaf(Scripted):
        def add(self, request: RequestView) -> None:
            raise ValueError("no")

    harness = Harness(scheduler=Deaf(everything))
    with pytest.raises(PluginFailedError, match="Deaf: add failed: ValueError: no"):
        harness.add("a", range(10))


@pytest.mark.parametrize("shares", [3, ["a"], [("a", 2)], iter([PrefillShare("a", 2)])])
def test_shares_of_another_type_are_refused(shares: Any) -> None:
    harness = Harness(scheduler=Scripted(lambda _: shares))
    harness.add("a", range(10))
    with pytest.raises(SchedulerError, match=r"Scripted scheduled .*a sequence of PrefillShare"):
        harness.step()


def test_a_share_beyond_what_is_left_of_a_prompt_is_refused() -> None:
    """What was computed in steps before counts."""
    shares = iter([4, 7])
    harness = Harness(Setting(steps_ahead=0), Scripted(lambda _: [PrefillShare("a", next(shares))]))
    harness.add("a", range(10))
    harness.step()
    with pytest.raises(SchedulerError, match="7 tokens; it has 6 to compute"):
        harness.step()


def test_two_shares_for_one_request_are_refused() -> None:
    harness = Harness(scheduler=Scripted(lambda _: [PrefillShare("a", 2)] * 2))
    harness.add("a", range(10))
    with pytest.raises(SchedulerError, match=r"scheduled 'a', which .* has a share already"):
        harness.step()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting(max_num_batched_tokens=25), "30 tokens in one step; 25 were left"),
        (Setting(max_num_seqs=2), "3 rows in one step; 2 were left"),
        (Setting(num_blocks=8, max_model_len=32), "9 blocks in one step; 8 were left"),
    ],
)
def test_more_than_is_left_is_refused(setting: Setting, message: str) -> None:
    """Tokens, rows and blocks beyond what SchedulerState says."""
    harness = Harness(setting, Scripted(everything))
    for i in range(3):
        harness.add(f"r{i}", range(10 * i, 10 * i + 10))
    with pytest.raises(SchedulerError, match=message):
        harness.step()


def test_a_victim_that_does_not_run_is_refused() -> None:
    """The choice of victim is checked like everything else."""
    harness = Harness(Setting(num_blocks=6), Scripted(everything, victim="nobody"))
    harness.add("a", range(8), greedy(12))
    harness.add("b", range(20, 28), greedy(12))
    with pytest.raises(SchedulerError, match=r"chose 'nobody' as the victim.* 2 running"):
        harness.run()


def test_a_scheduler_that_never_starts_anything_is_named() -> None:
    """Nothing runs and nothing is scheduled: an error instead of an endless loop."""
    harness = Harness(scheduler=Scripted(lambda _: []))
    harness.add("a", range(8))
    with pytest.raises(SchedulerError, match=r"Scripted scheduled nothing .* 1 requests wait"):
        harness.step()


def _greedy_chunks(state: SchedulerState) -> list[PrefillShare]:
    """Admit everybody with four tokens, then go on with four at a time while blocks last."""
    shares, blocks = [], state.free_blocks
    for request in (*state.prefilling, *state.waiting):
        chunk = min(4, request.num_tokens - request.num_scheduled)
        needed = state.num_new_blocks(request, chunk)
        if needed <= blocks:
            blocks -= needed
            shares.append(PrefillShare(request.request_id, chunk))
    return shares


@pytest.mark.parametrize("some_prompt_was_completed", [False, True])
def test_a_scheduler_that_goes_round_in_circles_is_named(some_prompt_was_completed: bool) -> None:
    """Whoever was preempted is begun again at once, so that nobody's blocks suffice."""

    def newcomers_first(state: SchedulerState) -> list[PrefillShare]:
        shares, blocks = [], state.free_blocks
        for request in (*state.waiting, *state.prefilling):
            if needed := state.num_new_blocks(request, 1):
                blocks -= needed
            if blocks >= 0:
                shares.append(PrefillShare(request.request_id, 1))
        return shares

    harness = Harness(
        Setting(num_blocks=6, max_model_len=24, prefix_caching=False), Scripted(newcomers_first)
    )
    if some_prompt_was_completed:
        harness.add("completed", [1, 2], greedy(2))
        harness.run()
    for i in range(4):
        harness.add(f"r{i}", range(20 * i % 30, 20 * i % 30 + 20), greedy(4))
    with pytest.raises(
        SchedulerError, match=r"Scripted preempts in a circle: .* preempted 11 times"
    ):
        harness.run()
    assert harness.engine.stats.preemptions == 10


def test_half_computed_prompts_cannot_block_each_other() -> None:
    """Three prompts hold all blocks and need more: the newest is preempted until one is done."""
    harness = Harness(
        Setting(num_blocks=6, max_model_len=24, prefix_caching=False), Scripted(_greedy_chunks)
    )
    for i in range(3):
        harness.add(f"r{i}", range(16 * i, 16 * i + 16), greedy(4))
    harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions >= 1


def test_the_head_of_the_queue_is_never_passed_over() -> None:
    """A big prompt that does not fit yet keeps small ones behind it waiting: no starving."""
    harness = Harness(Setting(num_blocks=8, max_model_len=32, prefix_caching=False))
    harness.add("running", range(16), greedy(10))
    harness.step()
    harness.add("big", range(20), greedy(2))
    harness.add("small", [1], greedy(2))
    harness.run()
    harness.check_all()
    order = [out.request_id for out in harness.outputs]
    assert order.index("running") < order.index("big")
    admitted = [len(a.token_ids) for plan in harness.executor.plans for a in plan.admissions]
    assert admitted == [16, 20, 1]


def test_an_unfinished_prompt_reserves_the_blocks_of_its_rest() -> None:
    """A waiting prompt is admitted only beside what the unfinished one still needs."""
    setting = Setting(num_blocks=8, max_num_batched_tokens=6, max_model_len=32)
    harness = Harness(setting)
    harness.add("long", range(24), greedy(2))
    harness.add("next", range(25, 40), greedy(2))
    for _ in range(4):
        harness.step()
    assert harness.engine.stats.running == 1
    harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions == 0


@pytest.mark.parametrize(
    ("reserve", "preemptions", "waits"),
    [(0.0, 2, [0, 0, 0]), (0.5, 1, [0, 0, 8]), (1, 0, [0, 8, 16])],
)
def test_a_policy_may_reserve_blocks_for_answers(
    reserve: float, preemptions: int, waits: list[int]
) -> None:
    """Five blocks of four tokens hold three prompts of one, and with its whole answer one of three.

    With halves of answers two requests run at once, and one is preempted at the end.
    """
    harness = Harness(
        Setting(num_blocks=5, steps_ahead=0), TokenBudgetScheduler(Reserving(reserve))
    )
    requests = [harness.add(f"{i}", [i] * 4, greedy(8))[0] for i in range(3)]
    harness.run()
    harness.check_all()
    assert harness.engine.stats.preemptions == preemptions
    assert [request.wait_steps for request in requests] == waits


@pytest.mark.parametrize("reserve", [0.25, 0.5, 0.75])
def test_a_block_that_a_row_has_early_is_not_given_to_a_prompt(reserve: float) -> None:
    """A row that decodes may have its next block before its share of the answer needs it. A prompt
    that needs one block more than are free waits."""
    setting = Setting(num_blocks=40, block_size=16, max_num_batched_tokens=2048, max_model_len=640)
    for joins in range(16, 30):
        harness = Harness(setting, TokenBudgetScheduler(Reserving(reserve)))
        harness.add("a", range(10), greedy(40))
        harness.add("b", range(40, 34, -1), greedy(28))
        for _ in range(joins):
            harness.step()
        num_free = harness.engine.stats.free_blocks
        harness.add("c", [49 - i % 7 for i in range(16 * num_free + 8)], greedy(1))
        harness.run()
        harness.check_all()


@pytest.mark.parametrize("reserve", [-0.1, 1.01, float("nan"), "all", None])
def test_a_share_to_reserve_is_0_to_1(reserve: Any) -> None:
    with pytest.raises(SchedulerError, match=r"Reserving: reserve is .*; it must be a share"):
        TokenBudgetScheduler(Reserving(reserve))


def test_a_scheduler_sees_the_requests_that_decode_and_the_blocks_they_would_take() -> None:
    """Those whose prompt is computed. Of a block of four tokens, three are free behind it."""
    seen = []

    def look(state: SchedulerState) -> list[PrefillShare]:
        seen.append([(r.request_id, state.num_new_blocks(r, 5)) for r in state.decoding])
        return everything(state)

    harness = Harness(Setting(steps_ahead=0), Scripted(look))
    harness.add("a", range(5), greedy(9))
    harness.step()
    harness.add("b", range(3), greedy(9))
    harness.step()
    assert seen == [[], [("a", 1)]]


def test_an_unfinished_prompt_waits_for_the_blocks_that_a_decoding_row_took() -> None:
    """What was free when it was admitted is not, later: it pauses, and loses nothing."""
    setting = Setting(
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        max_model_len=32,
        prefix_caching=False,
    )
    harness = Harness(setting)
    harness.add("running", range(2), greedy(14))
    for _ in range(3):
        harness.step()
    harness.add("long", range(3, 27), greedy(2))
    harness.run()
    harness.check_all()
    plans = harness.executor.plans
    chunks = [step for step, plan in enumerate(plans) if plan.prefill][1:]
    assert any(late - early > 1 for early, late in pairwise(chunks)), "it never paused"
    assert harness.engine.stats.preemptions == 0


def test_prompts_go_on_beside_decoding_rows() -> None:
    """One step mixes decodes with chunks, decodes first, under one budget."""
    harness = Harness(Setting(max_num_batched_tokens=8))
    harness.add("first", [1, 2, 3], greedy(12))
    harness.add("second", range(20), greedy(3))
    harness.run()
    harness.check_all()
    mixed = [plan for plan in harness.executor.plans if plan.num_decode and plan.prefill]
    assert len(mixed) >= 2
    assert max(plan.num_tokens for plan in mixed) == 8


def test_plans_list_the_decoding_rows_only_where_these_change() -> None:
    """Later plans of an epoch leave them out, with a new block or without."""
    harness = Harness(Setting(block_size=4))
    harness.add("a", [1, 2], greedy(20))
    harness.add("b", [3, 4], greedy(20))
    harness.run()
    plans = [plan for plan in harness.executor.plans if plan.num_decode == 2]
    assert len({plan.epoch for plan in plans}) == 1
    assert [plan.decode_rows is None for plan in plans] == [False] + [True] * (len(plans) - 1)
    assert sum(not plan.admissions and plan.appends is None for plan in plans) > 10
    assert any(plan.appends is not None for plan in plans)
    epochs = [plan.epoch for plan in harness.executor.plans]
    assert epochs == sorted(epochs)
    assert epochs[0] == 1


def test_the_bytes_of_a_steady_plan_do_not_grow_with_the_batch() -> None:
    """One row or 512: no list of rows is repeated; the count alone takes two bytes more."""
    sizes = []
    for num_rows in (1, 512):
        limits = {"max_num_seqs": num_rows, "num_blocks": num_rows}
        harness = Harness(Setting(**limits, block_size=64, max_num_batched_tokens=1024))
        for index in range(num_rows):
            harness.add(str(index), [index % 50], greedy(12))
        harness.run()
        steady = harness.executor.plans[5]
        assert (steady.num_decode, steady.admissions, steady.appends) == (num_rows, (), None)
        sizes.append(len(pickle.dumps(steady)))
    assert sizes[0] <= sizes[1] <= sizes[0] + 2 < 200


def test_steady_steps_are_those_that_decode_the_rows_of_the_step_before() -> None:
    """One prompt, 20 tokens: 19 decode steps, all but the first of them steady."""
    harness = Harness(Setting(block_size=4))
    harness.add("a", [1, 2], greedy(20))
    harness.run()
    stats = harness.engine.stats
    decode_steps = [plan for plan in harness.executor.plans if plan.num_decode]
    assert len(decode_steps) == 19
    assert stats.steady_steps == 18
    assert 0 < stats.steady_seconds <= stats.host_seconds


class Counting(TokenBudgetScheduler):
    """Counts how often it asks what a request needs, in each step."""

    def __init__(self) -> None:
        super().__init__(FcfsPolicy())
        self.asked: list[int] = []

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        self.asked.append(0)

        def counted(request: RequestView, num_tokens: int) -> int:
            self.asked[-1] += 1
            return state.num_new_blocks(request, num_tokens)

        return super().schedule(replace(state, num_new_blocks=counted))


def test_nobody_behind_a_head_that_does_not_fit_is_looked_at() -> None:
    """However long the queue: a step's work does not grow with it."""
    scheduler = Counting()
    harness = Harness(Setting(num_blocks=5, max_model_len=20), scheduler)
    harness.add("runs", range(12), greedy(8))
    for index in range(30):
        harness.add(f"waits {index}", range(index + 1, index + 13), greedy(2))
    for _ in range(5):
        harness.step()
    assert harness.engine.stats.running == 1
    assert scheduler.asked == [2, 1, 1, 1, 1, 1]


def test_a_scheduler_is_asked_only_while_somebody_waits_for_something_it_can_give() -> None:
    """Not for rows that decode, nor while every row is taken."""
    scheduler = Counting()
    harness = Harness(Setting(max_num_seqs=1, steps_ahead=0), scheduler)
    harness.add("a", range(8), greedy(6))
    harness.add("b", range(20, 28), greedy(6))
    harness.run()
    assert harness.engine.stats.steps == 12
    assert len(scheduler.asked) == 2


def test_the_blocks_that_an_unfinished_prompt_still_needs_are_given_to_nobody_else() -> None:
    """The last block is its own, though the step has tokens left for another prompt."""
    setting = Setting(num_blocks=4, max_model_len=17, max_num_batched_tokens=12, steps_ahead=0)
    harness = Harness(setting)
    harness.add("long", range(16), greedy(1))
    harness.add("short", range(20, 24), greedy(1))
    harness.step()
    harness.step()
    assert [len(plan.prefill) for plan in harness.executor.plans] == [1, 1]
    harness.run()
    harness.check_all()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_scheduler_learns_how_many_blocks_a_chunk_takes(prefix_caching: bool) -> None:
    """In whichever row the prompt is; what it shares with one that runs takes none."""
    seen: list[list[int]] = []

    def look(state: SchedulerState) -> list[PrefillShare]:
        requests = (*state.prefilling, *state.waiting)
        seen.append([state.num_new_blocks(request, 6) for request in requests])
        return [PrefillShare(request.request_id, 6) for request in requests][:2]

    setting = Setting(steps_ahead=0, prefix_caching=prefix_caching)
    harness = Harness(setting, Scripted(look))
    for name in ("a", "b"):
        harness.add(name, range(12), greedy(3))
    harness.step()
    harness.add("c", range(12), greedy(3))
    harness.step()
    assert seen == [[2, 2], [1, 1, 2]]


def test_prompts_may_take_the_last_block_and_the_last_token_of_a_step() -> None:
    """Five prompts of two blocks each in ten blocks and 40 tokens start together."""
    setting = Setting(num_blocks=10, max_num_seqs=5, max_num_batched_tokens=40, max_model_len=40)
    harness = Harness(setting)
    for index in range(5):
        harness.add(str(index), range(8 * index, 8 * index + 8), greedy(1))
    harness.step()
    assert len(harness.executor.plans) == 1
    assert [chunk.length for chunk in harness.executor.plans[0].prefill] == [8] * 5
    harness.run()
    harness.check_all()


class Backwards(SchedulingPolicy):
    """Last come, first served, all keys of a kind equal."""

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (-request.arrival_step,)


def test_equal_keys_are_served_in_the_order_of_arrival() -> None:
    """The policy's order first, then the order of arrival."""
    harness = Harness(Setting(max_num_seqs=1), TokenBudgetScheduler(Backwards()))
    for name in ("a", "b", "c"):
        harness.add(name, [ord(name) % 50], greedy(2))
    harness.step()
    harness.add("late", [1], greedy(2))
    harness.run()
    assert [out.request_id for out in harness.outputs] == ["a", "late", "b", "c"]


class Keyed(SchedulingPolicy):
    """Its keys are what the test says; with an error for one, that is raised."""

    def __init__(self, service: object = (0,), victim: object = (0,)) -> None:
        self.keys = {"service": service, "victim": victim}

    def _key(self, which: str) -> Any:
        if isinstance(error := self.keys[which], Exception):
            raise error
        return error

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return self._key("service")  # type: ignore[no-any-return]

    def victim_key(self, request: RequestView) -> tuple[float, ...]:
        return self._key("victim")  # type: ignore[no-any-return]


@pytest.mark.parametrize("key", [3, 0.5, None, "ab", ("a",), (1, None), (float("nan"),), {1: 2}])
@pytest.mark.parametrize("which", ["service", "victim"])
def test_a_key_that_is_no_tuple_of_numbers_is_the_policys_error(which: str, key: object) -> None:
    scheduler = TokenBudgetScheduler(Keyed(**{which: key}), "scheduler 'mine' (mine 1.0)")
    harness = Harness(Setting(), scheduler=scheduler)
    said = rf"scheduler 'mine' \(mine 1\.0\): {which}_key gave {re.escape(repr(key))}; .* tuple of"

    def serve() -> None:
        scheduler.choose_victim(harness.add("a", [1, 2]))

    with pytest.raises(SchedulerError, match=said):
        serve()


def test_an_error_in_a_key_names_the_policy_and_is_its_cause() -> None:
    harness = Harness(Setting(), scheduler=TokenBudgetScheduler(Keyed(ZeroDivisionError("oh"))))
    with pytest.raises(PluginFailedError, match=r"Keyed: service_key failed: Zero.*: oh") as caught:
        harness.add("a", [1, 2])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("key", [[1, 2.5], (True, -3), (), (np.int32(4), np.float32(1))])
def test_a_key_may_be_any_sequence_of_numbers(key: Any) -> None:
    harness = Harness(Setting(), scheduler=TokenBudgetScheduler(Keyed(key)))
    harness.add("a", [1, 2], greedy(2))
    harness.run()
    assert len(harness.outputs) == 1


def test_a_request_that_left_the_queue_is_skipped() -> None:
    """An aborted request's place in the queue comes to nothing."""
    harness = Harness(Setting(max_num_seqs=1))
    for name in ("a", "b", "c"):
        harness.add(name, [1, 2])
    harness.engine.abort("b")
    harness.run()
    assert [out.request_id for out in harness.outputs] == ["b", "a", "c"]


SLICES = [slice(*bounds) for bounds in product((None, -5, -1, 0, 1, 2, 9), repeat=2)]
SLICES += [slice(None, None, step) for step in (-2, -1, 2, 5)]


def test_waiting_requests_are_seen_as_a_sequence() -> None:
    """A scheduler may index the queue, from both ends, or cut it, and learns where it ends."""
    seen: list[str] = []

    def look(state: SchedulerState) -> list[PrefillShare]:
        if not seen:
            seen.extend([state.waiting[0].request_id, state.waiting[-1].request_id])
            with pytest.raises(IndexError):
                state.waiting[len(state.waiting)]
            for part in SLICES:
                assert state.waiting[part] == tuple(state.waiting)[part]
        return everything(state)

    harness = Harness(scheduler=Scripted(look))
    for name in ("a", "b", "c"):
        harness.add(name, [1, 2])
    harness.run()
    assert seen == ["a", "c"]


def test_fcfs_preempts_the_newest() -> None:
    """Without a key of its own for victims, a policy preempts whoever it serves last."""
    harness = Harness()
    requests = [harness.add(name, [1, 2])[0] for name in ("a", "b", "c")]
    policy = FcfsPolicy()
    assert policy.victim_key(requests[2]) > policy.victim_key(requests[0])
    assert TokenBudgetScheduler(policy).choose_victim(requests) == "c"


def test_a_scheduler_sees_the_priority_that_a_request_was_given() -> None:
    """All samples of a request have it, and one that says nothing has 0."""
    seen: dict[str, int] = {}

    def look(state: SchedulerState) -> list[PrefillShare]:
        seen.update({request.request_id: request.priority for request in state.waiting})
        return everything(state)

    harness = Harness(scheduler=Scripted(look))
    harness.add("plain", range(3))
    urgent = SamplingParams(temperature=0, max_tokens=2, priority=-3, n=2)
    harness.add("urgent", range(3, 6), urgent)
    harness.run()
    assert seen == {"plain": 0, "urgent": -3, "urgent#1": -3}
