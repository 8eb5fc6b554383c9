"""Random arrivals, lengths, prefixes, aborts, pools and depths: nothing is lost, nothing is wrong.

The fake worker refuses plans over the budget or beyond the rows; the engine checks its own
invariants at every step (debug mode); the reference says what every token must be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm_core.engine import FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.errors import SchedulerError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import (
    PrefillShare,
    RequestView,
    Scheduler,
    SchedulerState,
)
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.traffic import MOSTLY_ONE, arrivals, cache_windows, drive, engine_settings

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

WINDOWS = MOSTLY_ONE | cache_windows()


@given(data=st.data())
@SETTINGS
def test_any_run_gives_every_request_the_tokens_that_its_ids_decide(data: st.DataObject) -> None:
    """No block is lost or shared wrongly, no request is lost or starved, no budget is exceeded."""
    setting, max_prompt, max_output = data.draw(engine_settings(WINDOWS))
    requests = data.draw(st.lists(arrivals(max_prompt, max_output), min_size=1, max_size=9))
    drive(Harness(setting), requests)


class Reserving(FcfsPolicy):
    """Blocks for a share of each answer."""

    def __init__(self, reserve: float) -> None:
        self.reserve = reserve


@given(data=st.data(), reserve=st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0]))
@SETTINGS
def test_any_share_of_answers_may_have_blocks_and_whole_ones_are_not_preempted(
    data: st.DataObject, reserve: float
) -> None:
    """However few blocks there are, with windows, shared prefixes, samples and aborts."""
    setting, max_prompt, max_output = data.draw(engine_settings(WINDOWS))
    requests = data.draw(st.lists(arrivals(max_prompt, max_output), min_size=1, max_size=9))
    harness = Harness(setting, TokenBudgetScheduler(Reserving(reserve)))
    drive(harness, requests)
    assert reserve < 1 or harness.engine.stats.preemptions == 0


class ErraticScheduler(Scheduler):
    """Shares and victims by dice: whatever a scheduler may decide, this one does one day."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def schedule(self, state: SchedulerState) -> Sequence[PrefillShare]:
        budget, rows, blocks = state.token_budget, state.free_rows, state.free_blocks
        candidates = [*state.waiting, *state.prefilling]
        self.dice.shuffle(candidates)
        new = {request.request_id for request in state.waiting}
        shares: list[PrefillShare] = []
        for request in candidates:
            is_new = request.request_id in new
            done = state.num_cached_tokens(request) if is_new else request.num_scheduled
            most = min(request.num_tokens - done, budget)
            if most < 1 or (is_new and not rows) or (shares and self.dice.random() < 0.3):
                continue
            chunk = most if self.dice.random() < 0.6 else self.dice.randint(1, most)
            needed = state.num_new_blocks(request, chunk)
            if needed <= blocks:
                shares.append(PrefillShare(request.request_id, chunk))
                budget, rows, blocks = budget - chunk, rows - is_new, blocks - needed
        return shares

    def choose_victim(self, running: Sequence[RequestView]) -> str:
        return self.dice.choice(running).request_id


@given(data=st.data(), seed=st.integers(0, 2**16))
@SETTINGS
def test_an_erratic_scheduler_changes_the_order_and_never_the_tokens(
    data: st.DataObject, seed: int
) -> None:
    """The core keeps rows and blocks right whatever valid decisions a scheduler takes."""
    setting, max_prompt, max_output = data.draw(engine_settings(WINDOWS))
    requests = data.draw(st.lists(arrivals(max_prompt, max_output), min_size=1, max_size=7))
    try:
        drive(Harness(setting, ErraticScheduler(seed)), requests)
    except SchedulerError as error:  # By chance it preempts again and again what it admits.
        if "preempts in a circle" not in str(error):
            raise


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_all_depths_agree(data: st.DataObject) -> None:
    """The same requests give the same outputs with 0, 1, 2 and 3 steps ahead."""
    setting, max_prompt, max_output = data.draw(engine_settings(WINDOWS))
    requests = data.draw(st.lists(arrivals(max_prompt, max_output), min_size=1, max_size=5))
    outcomes = []
    for steps_ahead in range(4):
        fields = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
        harness = Harness(Setting(**{**fields, "steps_ahead": steps_ahead}))
        for i, arrival in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, n=arrival.n)
            harness.add(f"r{i}", arrival.prompt(), params, cache_salt=arrival.salt)
        finished = harness.run()
        outcomes.append({key: (out.token_ids, out.finish_reason) for key, out in finished.items()})
    assert all(outcome == outcomes[0] for outcome in outcomes)
