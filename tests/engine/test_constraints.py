"""Constraints on the host: every id is one that its request allowed, at any depth."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from nanovllm_core.engine import LoadedConstraint
from nanovllm_core.engine.constraints import MAX_STUCK, Filling, MaskFiller, SampleConstraints
from nanovllm_core.errors import InvalidSamplingError, ModelOutputError, PluginFailedError
from nanovllm_core.interfaces.constraint import (
    Constraint,
    ConstraintContext,
    ConstraintSpec,
    allow_ids,
    allows,
)
from nanovllm_core.interfaces.plan import mask_words
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.fake_worker import reference_tokens

VOCAB = Setting().vocab_size
RELEASE = Event()
"""Set at the end of a test, so that a call that hangs ends."""


class Step(BaseModel):
    """Arguments of `Rising`."""

    model_config = ConfigDict(extra="forbid")
    step: int
    fails: str = ""


class Wordless(Exception):  # noqa: N818
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


def allowed_after(step: int, prompt: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """The ids that `Rising` allows: those that differ from the sum of all ids by few, modulo V."""
    base = sum(prompt) * step + 7 * sum(outputs) + len(outputs)
    return sorted({(base + i * step) % VOCAB for i in range(5)})


class Rising(Constraint):
    """Allows ids by all ids before; on request it fails in one of many ways, at the third id."""

    def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> list[Any]:
        if arguments.fails == "start":
            raise KeyError("no start")
        return [arguments, prompt_ids.tolist(), []]

    def advance(self, state: list[Any], token_id: int) -> None:
        arguments, prompt, outputs = state
        assert token_id in allowed_after(arguments.step, prompt, outputs)
        if arguments.fails == "advance" and len(outputs) == 2:
            raise ValueError("no third")
        outputs.append(token_id)

    def fill(self, state: list[Any], mask: NDArray[np.int32]) -> None:
        arguments, prompt, outputs = state
        assert not mask.any()
        if len(outputs) == 2:
            match arguments.fails:
                case "fill":
                    raise SystemExit("no mask")
                case "wordless":
                    raise Wordless
                case "nothing":
                    return
                case "beyond":
                    mask[-1] = np.int32(-1) << (VOCAB % 32)
                    return
                case "hang":
                    RELEASE.wait(10)
                case "slow":
                    time.sleep(0.05)
        allow_ids(mask, allowed_after(arguments.step, prompt, outputs))


def loaded() -> dict[str, LoadedConstraint]:
    context = ConstraintContext(
        vocab_size=VOCAB, max_model_len=64, tokenizer="", eos_token_ids=()
    )  # fmt: skip
    spec = ConstraintSpec(
        name="rising", impl="a:B", contract=1, arguments=Step,
        check=lambda asked, size: [f"step is {asked.step}"] if asked.step >= size else [],
    )  # fmt: skip
    return {"rising": LoadedConstraint("constraint 'rising'", spec, Rising(NoOptions(), context))}


def make(seconds: float = 5.0, **setting: Any) -> Harness:
    return Harness(
        Setting(**setting), constraints=loaded(), constraint_seconds=seconds
    )  # fmt: skip


def params(step: int | None, fails: str = "", **more: Any) -> SamplingParams:
    asked = None if step is None else {"rising": {"step": step, "fails": fails}}
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **more}, constraints=asked)


def check(harness: Harness) -> None:
    """Every output that did not fail is the reference's under its constraint."""
    assert harness.finished.keys() == harness.requests.keys()
    for key, output in harness.finished.items():
        request = harness.requests[key]
        asked = (request.params.constraints or {}).get("rising")
        expected = reference_tokens(
            request.prompt_token_ids,
            request.sampling,
            request.max_length,
            VOCAB,
            allowed=None
            if asked is None
            else lambda outputs, r=request, a=asked: allowed_after(
                a["step"], r.prompt_token_ids, outputs
            ),
        )
        if output.finish_reason in ("error", "abort"):
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected, key


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


FAILURES = {
    "start": (0, r"constraint 'rising': start failed: KeyError: 'no start'; only this request"),
    "advance": (3, r"constraint 'rising': advance failed: ValueError: no third"),
    "fill": (2, r"constraint 'rising': fill failed: SystemExit: no mask"),
    "nothing": (
        2,
        r"constraint 'rising' allowed none of the 50 ids after 2 of the output; an answer",
    ),
    "beyond": (2, r"allowed none of the 50 ids"),
    "hang": (2, r"constraint 'rising': fill has not returned, .* within 0.2 s, .*or raise limits"),
    "wordless": (2, r"constraint 'rising': fill failed: Wordless; only this request ends"),
}


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("fails", FAILURES)
def test_a_constraint_that_fails_ends_its_own_request_alone(fails: str, steps_ahead: int) -> None:
    """With a typed error; the engine goes on, with requests of the same constraint too."""
    RELEASE.clear()
    num_ids, said = FAILURES[fails]
    harness = make(seconds=0.2, steps_ahead=steps_ahead)
    harness.add("before", [1], params(4, "slow"))
    harness.add("fails", [2], params(3, fails))
    if fails != "hang":
        harness.add("after", [3], params(2))
    harness.add("free", [4], params(None))
    started = time.perf_counter()
    harness.run()
    assert time.perf_counter() - started < 5.0
    harness.add("later", [3], params(2))
    harness.run()
    RELEASE.set()
    check(harness)
    output = harness.finished["fails", 0]
    assert (output.finish_reason, len(output.token_ids)) == ("error", num_ids)
    assert isinstance(output.error, PluginFailedError)
    with pytest.raises(PluginFailedError, match=said):
        raise output.error
    others = [one for key, one in harness.finished.items() if key != ("fails", 0)]
    assert {(one.finish_reason, one.error) for one in others} == {("length", None)}


@pytest.mark.parametrize("fails", ["hang", "slow"])
def test_a_step_waits_once_however_many_rows_are_late(fails: str) -> None:
    """Those whose masks are not made in time end, and the error names the call that was late."""
    RELEASE.clear()
    harness = make(seconds=0.3, max_num_seqs=32, num_blocks=128)
    for number in range(31):
        harness.add(str(number), [number + 1], params(3, fails))
    harness.add("free", [4], params(None))
    started = time.perf_counter()
    harness.run()
    assert time.perf_counter() - started < 1.2
    RELEASE.set()
    check(harness)
    assert harness.finished["free", 0].finish_reason == "length"
    errors = [str(one.error) for one in harness.finished.values() if one.error]
    assert len(errors) == 31 if fails == "hang" else 20 < len(errors) < 31
    assert all("constraint 'rising': fill has not returned, and the masks" in e for e in errors)


def test_threads_that_are_stuck_are_bounded() -> None:
    """Beyond the limit no further constraint is called, and requests without one go on."""
    RELEASE.clear()
    harness = make(seconds=0.02)
    for number in range(MAX_STUCK + 1):
        harness.add(str(number), [number + 1], params(3, "hang"))
        harness.add(f"free {number}", [4], params(None))
        harness.run()
    errors = [str(one.error) for one in harness.finished.values() if one.error]
    assert sum("has not returned, and the masks" in one for one in errors) == MAX_STUCK
    assert sum("16 calls of constraints have not returned" in one for one in errors) == 1
    RELEASE.set()
    check(harness)
    for thread in harness.engine._masking._filler._stuck:
        thread.join(5.0)
        assert not thread.is_alive(), "it ends when its call returns"
    harness.add("again", [1], params(3))
    harness.run()
    assert harness.finished["again", 0].finish_reason == "length"


def test_a_call_that_was_late_makes_no_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its own sample's next constraint, nor of the samples behind it."""
    RELEASE.clear()
    calls: list[str] = []

    class Noted(Rising):
        def start(self, arguments: Any, prompt_ids: NDArray[np.int32]) -> Any:
            calls.append(f"start {prompt_ids[0]}")
            RELEASE.wait(10)
            return super().start(arguments, prompt_ids)

        def fill(self, state: Any, mask: NDArray[np.int32]) -> None:
            calls.append("fill")

    one = loaded()["rising"]
    noted = LoadedConstraint("noted", one.spec, Noted(NoOptions(), one.constraint.context))
    samples = [
        SampleConstraints([(noted, Step(step=1))] * 2, np.array([first], np.int32), VOCAB)
        for first in (1, 2)
    ]
    filler = MaskFiller(0.05)
    errors = filler.fill([Filling(sample, []) for sample in samples])
    assert all("noted: start has not returned" in str(error) for error in errors)
    RELEASE.set()
    [thread] = filler._stuck
    thread.join(5.0)
    assert calls == ["start 1"]


def test_the_thread_is_kept_and_ends_with_its_engine() -> None:
    harness = make()
    harness.add("a", [1], params(3))
    harness.run()
    thread = harness.engine._masking._filler._thread
    assert thread is not None
    harness.add("b", [2], params(3))
    harness.run()
    assert harness.engine._masking._filler._thread is thread
    assert thread.is_alive()
    del harness
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


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


def test_an_id_that_no_mask_allowed_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `min_tokens` forbids the only id that is allowed: the sampler has no choice left."""
    harness = make()
    monkeypatch.setattr(harness.executor, "_sample", lambda row, allowed: pick(row))

    def pick(row: int) -> tuple[int, bool]:
        harness.executor.rows[row].ids.append(9)
        return 9, False

    harness.add("asks", [1, 2], params(1, logprobs=1))
    harness.run()
    output = harness.finished["asks", 0]
    assert (output.finish_reason, output.token_ids, output.logprobs) == ("error", [], [])
    assert harness.requests["asks", 0].num_output_tokens == 0 == harness.engine.stats.output_tokens
    assert str(output.error) == (
        "min_tokens or a logits processor of the request forbids every id that constraint "
        "'rising' allowed after 0 of the output; change one of them"
    )


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


def test_logits_that_no_model_may_give_are_named_in_the_second_part_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debug mode looks at them when the masks are there; the error names the request."""

    def broken(masks: Any) -> None:
        raise ModelOutputError("NaN", rows=masks.rows.tolist())

    harness = make()
    monkeypatch.setattr(harness.executor, "sample", broken)
    harness.add("asks", [1, 2], params(1))
    with pytest.raises(ModelOutputError, match="request asks, NaN"):
        harness.run()


def test_logits_of_a_row_that_is_over_end_the_engine_with_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host knows its end between the two parts of a step, by a stop id that it alone checks."""
    harness = make(steps_ahead=1)
    sample = harness.executor.sample

    def broken(masks: Any) -> None:
        over = [row for row in harness.executor.waiting if row not in harness.engine._running]
        if over:
            raise ModelOutputError("NaN", rows=over)
        sample(masks)

    monkeypatch.setattr(harness.executor, "sample", broken)
    harness.add("asks", [1, 2], params(1, max_tokens=20))
    harness.add("ends", [3], params(None, max_tokens=20, stop_token_ids=range(VOCAB)))
    with pytest.raises(ModelOutputError, match=r"^NaN$"):
        harness.run()


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
