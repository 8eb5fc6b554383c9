"""Constraints on the host: every id is one that its request allowed, at any depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from nanovllm_core.engine import LoadedConstraint
from nanovllm_core.engine.constraints import SampleConstraints
from nanovllm_core.errors import InvalidSamplingError
from nanovllm_core.interfaces.constraint import (
    allow_ids,
    allows,
)
from nanovllm_core.interfaces.plan import mask_words
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit.engine_harness import Harness, Setting

from .rising import VOCAB, Rising, Step, check, loaded, make, params


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_every_id_is_one_that_was_allowed_and_the_others_are_as_ever(steps_ahead: int) -> None:
    """Some rows ask, some do not; greedy, sampled, with log-probabilities, with stop ids."""
    harness = make(steps_ahead=steps_ahead, max_num_seqs=5)
    harness.add("asks", [1, 2, 3], params(3))
    harness.add("free", [4, 5], params(None))
    harness.add("noise", [6], params(2, temperature=0.8, seed=5, logprobs=1, n=3))
    harness.add("stops", [7, 7], params(1, stop_token_ids=range(0, VOCAB, 4), min_tokens=2))
    harness.add("long", list(range(9)) * 3, params(5), stream=True)
    harness.run()
    check(harness)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_runs_keep_to_their_constraints(data: st.DataObject) -> None:
    """Preemption, chunks of prompts, prefix hits, aborts in mid-step; few blocks, any depth."""
    steps = st.none() | st.integers(1, 9)
    harness = make(
        steps_ahead=data.draw(st.integers(0, 3)),
        num_blocks=data.draw(st.integers(9, 20)),
        max_num_seqs=4,
        max_num_batched_tokens=data.draw(st.sampled_from([4, 9, 64])),
        max_model_len=32,
    )
    for number in range(data.draw(st.integers(2, 8))):
        size = data.draw(st.integers(1, 20))
        asked = params(
            data.draw(steps),
            max_tokens=data.draw(st.integers(1, 10)),
            temperature=data.draw(st.sampled_from([0, 0.7])),
            seed=number,
            n=data.draw(st.integers(1, 2)),
        )
        harness.add(str(number), [(7 * i) % 11 for i in range(size)], asked)
        for _ in range(data.draw(st.integers(0, 3))):
            harness.step()
        if data.draw(st.integers(0, 5)) == 0:
            harness.engine.abort(str(data.draw(st.integers(0, number))))
    harness.run()
    check(harness)


def test_the_forward_pass_is_launched_before_the_mask_is_made() -> None:
    """One step ahead: the next forward pass, then the last ids, then the masks."""
    harness = make(steps_ahead=1)
    events = harness.executor.events
    harness.add("asks", [1, 2, 3], params(3, max_tokens=4))
    fill = Rising.fill

    def noted(self: Rising, state: Any, mask: Any) -> None:
        events.append("fill")
        fill(self, state, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rising, "fill", noted)
        harness.run()
    first = ["submit", "fill", "sample"]
    assert events == [*first, *["submit", "collect", "fill", "sample"] * 3, "collect"]
    check(harness)


def test_a_step_without_constrained_rows_is_submitted_in_one_part() -> None:
    """Before, between and after steps that are: the plan is as it was, and nothing is sampled."""
    harness = make()
    harness.add("free", [1, 2], params(None, max_tokens=20))
    harness.step()
    harness.step()
    harness.add("asks", [3, 4], params(2, max_tokens=3))
    harness.run()
    later = [plan.samples_later for plan in harness.executor.plans]
    assert later.count(True) == 3 == harness.executor.events.count("sample")
    assert later[0] is later[-1] is False
    check(harness)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_request_may_choose_what_all_its_constraints_allow(steps_ahead: int) -> None:
    """Of ids that one allows and of ids that the other does, those in both sets."""

    class Pair(Rising):
        def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
            allow_ids(mask, [state[0].step, 40])

    one = loaded()["rising"]
    both = {
        name: LoadedConstraint(name, one.spec, Pair(NoOptions(), one.constraint.context))
        for name in ("one", "two")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pair, "advance", lambda self, state, token_id: None)
        harness = Harness(Setting(steps_ahead=steps_ahead), constraints=both)
        asked = {"one": {"step": 3}, "two": {"step": 5}}
        harness.add("a", [1, 2], SamplingParams(temperature=0, max_tokens=6, constraints=asked))
        harness.run()
    assert harness.finished["a", 0].token_ids == [40] * 6


@pytest.mark.parametrize("steps_ahead", [2, 3])
def test_a_prompt_that_is_over_gets_no_mask(steps_ahead: int) -> None:
    """Its chunk is in flight when it is aborted, and its row has another request or none."""
    harness = make(steps_ahead=steps_ahead, max_num_batched_tokens=4)
    harness.add("free", [5], params(None, max_tokens=30))
    for _ in range(3):
        harness.step()
    harness.add("over", [1, 2], params(3, "start"))
    submit = harness.executor.submit

    def aborting(plan: Any) -> None:
        submit(plan)
        if plan.samples_later:
            harness.engine.abort("over")

    harness.executor.submit = aborting  # type: ignore[method-assign]
    harness.run()
    assert harness.finished["over", 0].finish_reason == "abort"
    check(harness)


def test_arguments_are_checked_when_the_request_is_added() -> None:
    """An unknown name, wrong arguments, and what the plugin's check refuses."""
    harness = make()
    wrong = {
        "no constraint 'risin'; did you mean rising\\?": {"risin": {}},
        "constraints.rising.step: ": {"rising": {"step": "x"}},
        "constraints.rising.stepp: unknown": {"rising": {"step": 1, "stepp": 2}},
        "constraints.rising: step is 50": {"rising": {"step": 50}},
    }
    for said, asked in wrong.items():
        with pytest.raises(InvalidSamplingError, match=said):
            harness.add("a", [1], SamplingParams(max_tokens=4, constraints=asked))
    with pytest.raises(InvalidSamplingError, match="constraints is 'json'; it must map names"):
        SamplingParams(constraints="json")  # type: ignore[arg-type]
    assert not harness.engine.has_unfinished()


@given(st.sets(st.integers(0, 99)))
@settings(derandomize=True)
def test_bits_of_a_mask_are_ids(ids: set[int]) -> None:
    """Bit i of word j is id 32 j + i, in whatever sequence they come, or as a boolean array."""
    listed = [*ids, *ids]
    flags = np.isin(np.arange(100), listed)
    for ways in (
        listed,
        np.array(listed, np.uint8),
        flags,
        [*flags],
        flags[: max(ids, default=0) + 1],
    ):
        mask = np.zeros(mask_words(100), np.int32)
        allow_ids(mask, [99])
        allow_ids(mask, ways)
        assert {one for one in range(100) if allows(mask, one)} == ids | {99}
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert {*np.flatnonzero(bits).tolist()} == ids | {99}


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([-1, 5], "token_ids are -1 to 5; a mask of 4 words has bits for 0 to 127"),
        ([128], "token_ids are 128 to 128; a mask of 4 words"),
        ([0.5], r"token_ids are float64 \[1(00)?\]; they must be ids, or bool"),
        ([None], r"token_ids are object \[1(00)?\]; they must be ids, or bool"),
        ([True] * 129, r"token_ids are bool \[129(00)?\]; they must be ids, or bool"),
    ],
)
def test_what_is_no_id_of_a_mask_is_refused(wrong: list[Any], said: str, times: int) -> None:
    """A negative id would set the bit of another one."""
    mask = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match=said):
        allow_ids(mask, wrong * times)
    assert not mask.any()


@pytest.mark.parametrize("vocab", [31, 32, 33, 64])
def test_bits_beyond_the_vocabulary_count_for_nothing(vocab: int) -> None:
    """A plugin may set whole words."""

    class All(Rising):
        def start(self, arguments: Any, prompt_ids: Any) -> Any:
            return None

        def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
            mask[:] = -1

    one = loaded()["rising"]
    context = one.constraint.context
    every = LoadedConstraint("all", one.spec, All(NoOptions(), context))
    sample = SampleConstraints([(every, Step(step=1))], np.array([1], np.int32), vocab)
    mask = sample.next_mask([], lambda call: None)
    assert np.unpackbits(mask.view(np.uint8)).sum() == vocab
