"""A row that changes hands keeps nothing of the request that had it."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
)
from nanovllm_kit.engine_harness import Harness, Setting


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_a_row_forgets_the_length_at_which_its_last_request_ended() -> None:
    """The first chunk of the next request, which needs no more blocks, ends at that very length."""
    setting = Setting(block_size=16, max_num_seqs=1, max_num_batched_tokens=5, steps_ahead=0)
    harness = Harness(setting)
    harness.add("first", [1, 2], greedy(4))
    harness.add("next", range(16), greedy(1))
    harness.run()
    harness.check_all()


class NewestFirst(Scheduler):
    """Two tokens for every prompt in each step."""

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        return [
            PrefillShare(request.request_id, min(2, request.num_tokens - done))
            for request, done in (
                *((request, state.num_cached_tokens(request)) for request in state.waiting),
                *((request, request.num_scheduled) for request in state.prefilling),
            )
        ]

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return running[-1].request_id


def test_a_row_forgets_the_length_at_which_its_last_request_would_have_filled_a_block() -> None:
    """A prompt of that length is not findable before it is computed: its twin would read it."""
    harness = Harness(Setting(max_num_seqs=2, steps_ahead=0), NewestFirst())
    harness.add("gone", range(6), greedy(9))
    while not harness.engine.stats.output_tokens:
        harness.step()
    harness.engine.abort("gone")
    harness.add("next", range(20, 29), greedy(2))
    harness.step()
    harness.add("twin", range(20, 29), greedy(2))
    harness.run()
    harness.check_all()


def test_every_request_and_sample_has_its_number_in_the_order_of_arrival() -> None:
    harness = Harness()
    requests = [
        request
        for name, n in (("a", 1), ("b", 3), ("c", 2))
        for request in harness.add(name, [1], SamplingParams(n=n, max_tokens=2))
    ]
    assert [request.arrival_index for request in requests] == list(range(6))
