"""Each invariant of the engine's state, one beyond its bound and at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanovllm_core.engine import Engine, EngineLimits, FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.engine.request import Request, RequestState
from nanovllm_core.engine.request_factory import derive_seed
from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Setting

Break = Callable[[Harness, Request], None]


@pytest.fixture
def running() -> tuple[Harness, Request]:
    """Two requests that decode, of 6 prompt ids and 20 output ids each, with a step in flight."""
    harness = Harness()
    (request,) = harness.add("a", range(6), SamplingParams(temperature=0, max_tokens=20))
    harness.add("b", range(10, 16), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(3):
        harness.step()
    harness.engine.assert_consistent()
    assert (request.num_tokens, request.num_scheduled, request.num_blocks) == (9, 9, 3)
    return harness, request


def a_row_is_lost(harness: Harness, _: Request) -> None:
    harness.engine._rows.free.pop()


def a_taken_row_is_free(harness: Harness, request: Request) -> None:
    harness.engine._rows.free[0] = request.row


def a_row_has_another_request(harness: Harness, request: Request) -> None:
    running = harness.engine._planner.running
    running[request.row] = running[1 - request.row]


def a_request_holds_a_row_that_is_free(harness: Harness, request: Request) -> None:
    del harness.engine._planner.running[request.row]
    harness.engine._rows.free.append(request.row)


def it_decodes_without_a_row(harness: Harness, request: Request) -> None:
    a_request_holds_a_row_that_is_free(harness, request)
    request.row = -1


def a_block_has_no_owner(harness: Harness, _: Request) -> None:
    harness.engine._kv.pool.allocate()


def it_runs_one_past_its_length(harness: Harness, request: Request) -> None:
    harness.engine._rows.known[request.row] = request.max_length + 1


def it_is_planned_to_its_length(harness: Harness, request: Request) -> None:
    harness.engine._rows.scheduled[request.row] = request.max_length


def one_more_token_is_in_flight_than_steps(harness: Harness, request: Request) -> None:
    harness.engine._rows.known[request.row] = request.num_scheduled - 2


def less_than_nothing_is_in_flight(harness: Harness, request: Request) -> None:
    harness.engine._rows.known[request.row] = request.num_scheduled + 2


def it_lacks_a_block(harness: Harness, request: Request) -> None:
    rows = harness.engine._rows
    rows.known[request.row] = rows.scheduled[request.row] = 13


def it_holds_a_block_too_early(harness: Harness, request: Request) -> None:
    rows = harness.engine._rows
    rows.known[request.row] = rows.scheduled[request.row] = 7


def it_shares_one_block_more_than_it_holds(_: Harness, request: Request) -> None:
    request.num_published = request.num_blocks + 1


def it_shares_a_block_that_is_not_full(_: Harness, request: Request) -> None:
    request.num_published = 3


def it_was_preempted_and_holds_blocks(harness: Harness, request: Request) -> None:
    harness.engine._planner.draining.append(request)


def it_is_finished(_: Harness, request: Request) -> None:
    request.state = RequestState.FINISHED


def it_waits_in_a_row(harness: Harness, request: Request) -> None:
    request.state = RequestState.WAITING
    harness.engine._planner.waiting[request.request_id] = request


def it_waits_under_anothers_name(harness: Harness, request: Request) -> None:
    harness.engine._planner.waiting[request.request_id] = request


def its_prompt_is_unfinished(harness: Harness, request: Request) -> None:
    harness.engine._planner.prefilling[request.request_id] = request


def its_row_does_not_decode(harness: Harness, request: Request) -> None:
    harness.engine._rows.decoding[request.row] = 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (a_row_is_lost, r"rows \[0, 1\] are taken and \[3\] are free, of 4"),
        (a_taken_row_is_free, "are taken"),
        (a_row_has_another_request, "row 0 is not its request's row"),
        (a_request_holds_a_row_that_is_free, r"requests hold rows \[0, 1\], not \[1\]"),
        (it_decodes_without_a_row, "a is decoding in row -1"),
        (a_block_has_no_owner, r"block \d+ counts 1 holders, 0 requests name it"),
        (it_runs_one_past_its_length, "a has 27 ids of 26 at most"),
        (it_is_planned_to_its_length, "a is planned to 26, past 25"),
        (one_more_token_is_in_flight_than_steps, "a has 3 tokens in flight, of 2 at most"),
        (less_than_nothing_is_in_flight, "a has -1 tokens in flight"),
        (it_lacks_a_block, "a holds 3 blocks for 13 positions"),
        (it_holds_a_block_too_early, "a holds 3 blocks for 7 positions"),
        (it_shares_one_block_more_than_it_holds, "a shares blocks it does not hold"),
        (it_shares_a_block_that_is_not_full, "a shares 3 blocks and has 9 ids for them"),
        (it_was_preempted_and_holds_blocks, "a was preempted and still holds blocks"),
        (it_is_finished, "a is finished and still listed"),
        (it_waits_in_a_row, "a is waiting in row 0"),
        (it_waits_under_anothers_name, "a is decoding, the queue says otherwise"),
        (its_prompt_is_unfinished, "a is decoding, the list of prompts says otherwise"),
        (its_row_does_not_decode, "a is decoding, its row says otherwise"),
    ],
)
def test_a_state_one_beyond_a_bound_is_noticed(
    running: tuple[Harness, Request], how: Break, message: str
) -> None:
    harness, request = running
    how(harness, request)
    with pytest.raises(InconsistentStateError, match=message):
        harness.engine.assert_consistent()


def test_debug_mode_notices_at_the_end_of_the_step(running: tuple[Harness, Request]) -> None:
    harness, _ = running
    harness.engine._rows.free.pop()
    with pytest.raises(InconsistentStateError, match="are taken"):
        harness.step()


def at_its_length(harness: Harness, request: Request) -> None:
    rows = harness.engine._rows
    rows.known[request.row] = request.max_length
    rows.scheduled[request.row] = request.max_length - 1
    while request.num_blocks * 4 < request.max_length - 1:
        harness.engine._kv.add_blocks(request)


def all_steps_in_flight_are_its(harness: Harness, request: Request) -> None:
    harness.engine._rows.known[request.row] = request.num_scheduled - 1


def nothing_in_flight(harness: Harness, request: Request) -> None:
    harness.engine._rows.known[request.row] = request.num_scheduled + 1


def every_block_full(harness: Harness, request: Request) -> None:
    rows = harness.engine._rows
    rows.known[request.row] = rows.scheduled[request.row] = 12


def a_block_one_step_early(harness: Harness, request: Request) -> None:
    rows = harness.engine._rows
    rows.known[request.row] = rows.scheduled[request.row] = 8


def all_blocks_shared(harness: Harness, request: Request) -> None:
    every_block_full(harness, request)
    request.num_published = request.num_blocks


@pytest.mark.parametrize(
    "how",
    [
        at_its_length,
        all_steps_in_flight_are_its,
        nothing_in_flight,
        every_block_full,
        a_block_one_step_early,
        all_blocks_shared,
    ],
)
def test_a_state_at_its_bound_is_in_order(running: tuple[Harness, Request], how: Break) -> None:
    harness, request = running
    how(harness, request)
    harness.engine.assert_consistent()


def test_an_unfinished_prompt_holds_no_block_that_its_chunks_do_not_need() -> None:
    """Blocks come early only to rows that decode."""
    harness = Harness(Setting(max_num_seqs=1, max_num_batched_tokens=4, steps_ahead=0))
    (request,) = harness.add("a", range(9), SamplingParams(max_tokens=2))
    harness.step()
    harness.engine._kv.add_blocks(request)
    with pytest.raises(InconsistentStateError, match="a holds 2 blocks for 4 positions"):
        harness.engine.assert_consistent()


def test_an_engine_that_is_told_nothing_works_one_step_ahead_caches_and_checks_nothing() -> None:
    """Invariants cost as much as the step: they are checked in debug mode alone."""
    harness = Harness()
    s: Setting = harness.setting
    limits = EngineLimits(
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_model_len=s.max_model_len,
        num_blocks=s.num_blocks,
        block_size=s.block_size,
        vocab_size=s.vocab_size,
    )
    engine = Engine(harness.executor, TokenBudgetScheduler(FcfsPolicy()), limits)
    assert engine.limits is limits
    engine.add_request("a", range(6), SamplingParams(max_tokens=9))
    assert engine._samples["a"][0].sampling.seed == derive_seed(0, 0)
    engine._rows.free.pop(0)
    engine.step()
    assert harness.executor.most_in_flight == 2
    with pytest.raises(InconsistentStateError):
        engine.assert_consistent()
    while engine.has_unfinished():
        engine.step()
    engine.add_request("b", range(6), SamplingParams(max_tokens=1))
    engine.step()
    assert engine.stats.prefix_hit_tokens == 4
