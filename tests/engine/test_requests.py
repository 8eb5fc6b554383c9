"""Requests are checked when they come, end for a true reason, and can be aborted at any time."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from nanovllm_core.engine import EngineLimits, FcfsPolicy, Observation
from nanovllm_core.engine.request import RequestState
from nanovllm_core.engine.request_factory import derive_seed
from nanovllm_core.errors import (
    ConfigError,
    EngineClosedError,
    ExecutorError,
    InconsistentStateError,
    InvalidPromptError,
    InvalidSamplingError,
    ModelOutputError,
    PluginFailedError,
    RequestError,
    RequestTooLongError,
)
from nanovllm_core.interfaces.observer import RequestRecord, StepObserver, StepRecord
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, PADDED, StepPlan, StepResult
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Letters, Setting, letters


def greedy(max_tokens: int | None = 8, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[1, 50], [-1], [1, 2, 2**40]])
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidPromptError, match="outside the vocabulary of 50 ids"):
        Harness().add("a", prompt)


@pytest.mark.parametrize("prompt", [[1.5], [[1, 2]], [[1], [2, 3]], np.zeros((1, 2), np.int64)])
def test_a_prompt_that_is_not_a_flat_list_of_ids_is_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidPromptError, match="flat list of whole token ids"):
        Harness().add("a", prompt)


def test_stop_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidSamplingError, match="stop_token_ids has token id 50"):
        Harness().add("a", [1], greedy(stop_token_ids=[3, 50]))


def test_ids_of_a_bias_outside_the_vocabulary_are_refused() -> None:
    """Biases of 0 are no work for the tail."""
    with pytest.raises(InvalidSamplingError, match=r"logit_bias has token id 50; .* has 50 ids"):
        Harness().add("a", [1], greedy(logit_bias={3: 1.0, 50: 0.0}))
    harness = Harness()
    requests = harness.add("a", [1], greedy(logit_bias={49: -2.0, 3: 0.0}))
    requests += harness.add("b", [1], greedy(logit_bias={3: 0.0}))
    a, b = (request.sampling for request in requests)
    assert (a.logit_bias, a.needs_tail) == (((49, -2.0),), True)
    assert (b.logit_bias, b.needs_tail) == ((), False)


def test_min_tokens_beyond_the_model_length_are_refused() -> None:
    with pytest.raises(RequestTooLongError, match=r"min_tokens=60 make 70; .* at most 54"):
        Harness().add("a", range(10), greedy(None, min_tokens=60))


@pytest.mark.parametrize(("top_k", "sent"), [(-1, 0), (0, 0), (49, 49), (50, 0), (2**62, 0)])
def test_a_top_k_that_cuts_nothing_reaches_the_device_as_off(top_k: int, sent: int) -> None:
    """However large: no integer of the device has to hold it, and the fast sampler stays on."""
    (request,) = Harness().add("a", [1], SamplingParams(top_k=top_k, max_tokens=8))
    assert request.sampling.top_k == sent
    assert request.sampling.needs_tail == (sent > 0)


def test_a_scheduler_that_fails_at_a_request_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has noted of the queue is unknown; later calls name its error, not a symptom."""
    harness = Harness()
    monkeypatch.setattr(FcfsPolicy, "service_key", lambda _policy, _request: 1 // 0)
    with pytest.raises(PluginFailedError, match="FcfsPolicy: service_key failed: ZeroDivision"):
        harness.add("a", [1])
    with pytest.raises(EngineClosedError, match="ended with PluginFailedError"):
        harness.engine.step()


def test_a_failed_engine_keeps_its_cause() -> None:
    """Whatever its callers still tell it of requests that it half knows."""
    harness = Harness()
    harness.add("a", [1], greedy(stop="x"), detokenizer=Letters)
    engine, cause = harness.engine, RuntimeError("a bug")
    engine._failure = cause
    engine._unfinished.clear()
    engine.end_at("a", 0, 1, "x")
    engine.abort("a")
    with pytest.raises(EngineClosedError, match="the engine ended with RuntimeError: a bug"):
        engine.reset_prefix_cache()
    assert engine._failure is cause


def test_a_worker_that_ends_while_nothing_runs_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at healthy workers changes nothing; the next call after a dead one names its error."""
    engine = (harness := Harness()).engine
    engine.check_workers()

    def gone() -> None:
        raise ExecutorError("rank 1 is gone")

    monkeypatch.setattr(harness.executor, "check", gone)
    with pytest.raises(ExecutorError, match="rank 1 is gone"):
        engine.check_workers()
    with pytest.raises(EngineClosedError, match="ended with ExecutorError: rank 1 is gone"):
        engine.check_workers()


def test_outputs_that_end_a_request_leave_nothing_to_go_on_with() -> None:
    """Those of an engine that ended while its last token was on the way."""
    harness = Harness()
    add = harness.engine.add_request
    add("a", [1, 2], greedy(4), output_token_ids=[3, 4, 5])
    with pytest.raises(RequestTooLongError, match=r"4 output_token_ids leave no token .* its 4th"):
        add("b", [1, 2], greedy(4), output_token_ids=[3, 4, 5, 6])
    assert len(harness.engine._unfinished) == 1


def test_a_batch_is_known_once_it_is_queued() -> None:
    """Ids and arrivals of its requests are distinct, and as if each had been added alone."""
    harness, alone = Harness(), Harness()
    engine = harness.engine
    batch = engine.new_batch()
    batch.add("a", [1], greedy(n=2))
    batch.add("b", [2], greedy())
    with pytest.raises(RequestError, match="'a#1' is in use"):
        batch.add("a#1", [3], greedy())
    with pytest.raises(InvalidPromptError):
        batch.add("c", [], greedy())
    assert not engine.has_unfinished()
    engine.enqueue(batch)
    for name, prompt, count in (("a", [1], 2), ("b", [2], 1)):
        alone.engine.add_request(name, prompt, greedy(n=count))
    seeds = [
        {name: one.sampling.seed for name, one in each._unfinished.items()}
        for each in (engine, alone.engine)
    ]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0].values()}) == 3


def test_stop_strings_need_a_caller_who_searches_the_text() -> None:
    with pytest.raises(InvalidSamplingError, match=r"stop is .* ids and no text; search the text"):
        Harness().add("a", [1], greedy(stop="x"))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    """Also an id that a sample of another request goes by."""
    harness = Harness()
    harness.add("a", [1], greedy(n=2))
    for taken in ("a", "a#1"):
        with pytest.raises(RequestError, match=f"'{taken}' is in use"):
            harness.add(taken, [1])
    harness.run()
    harness.finished.clear()
    harness.add("a", [1])
    harness.run()


@pytest.mark.parametrize("taken", ["a#1", "a#2"])
def test_a_sample_id_in_use_is_refused_before_anything_changes(taken: str) -> None:
    """The other samples of the refused request are not known, and take no seed."""
    harness = Harness()
    harness.add(taken, [1])
    before = harness.engine.stats, harness.engine._num_arrived
    with pytest.raises(RequestError, match=f"'{taken}' is in use"):
        harness.add("a", [1], greedy(n=3))
    assert (harness.engine.stats, harness.engine._num_arrived) == before
    assert list(harness.engine._samples) == [taken]
    harness.run()
    harness.check_all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_batched_tokens": 3}, "3, below max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_limits_under_which_nothing_runs_are_refused(changed: dict[str, int], message: str) -> None:
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "num_blocks": 64,
        "block_size": 4,
        "vocab_size": 50,
    }
    EngineLimits(**sizes)
    with pytest.raises(ConfigError, match=message):
        EngineLimits(**{**sizes, **changed})


def test_a_negative_number_of_steps_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps_ahead is -1"):
        Harness(Setting(steps_ahead=-1))


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_ends_a_request_in_any_state(steps: int, steps_ahead: int) -> None:
    """Held, waiting, half computed, decoding or draining: it ends, the neighbours do not notice."""
    setting = Setting(max_num_batched_tokens=6, max_num_seqs=3, steps_ahead=steps_ahead)
    harness = Harness(setting)
    harness.add("neighbour", range(3), greedy(9))
    harness.add("gone", range(10, 19), greedy(3, n=3))
    harness.add("behind", range(30, 33), greedy(4))
    for _ in range(steps):
        harness.step()
    harness.engine.abort("gone")
    harness.engine.abort("gone")
    harness.engine.abort("never there")
    harness.engine.assert_consistent()
    harness.run()
    harness.check_all()


def test_an_aborted_request_that_was_preempted_leaves_nothing_behind() -> None:
    """An abort between a preemption and the arrival of the tokens in flight."""
    harness = Harness(Setting(num_blocks=6, block_size=4, steps_ahead=2))
    harness.add("first", range(8), greedy(12))
    (second,) = harness.add("second", range(20, 28), greedy(12))
    while not harness.engine.stats.preemptions:
        harness.step()
    assert second.state is RequestState.DRAINING
    harness.engine.abort("second")
    harness.run()
    harness.check_all()


@pytest.mark.parametrize("act", ["step", "add", "abort"])
def test_an_abort_may_come_between_any_two_lines(act: str) -> None:
    """A stream that nobody holds is finalised whenever Python collects garbage: it aborts then."""
    line = 0
    while line >= 0:
        harness = Harness(Setting(num_blocks=12, block_size=4, max_num_batched_tokens=10))
        for name in ("neighbour", "gone", "other"):
            harness.add(name, range(3, 8), greedy(7), stream=name == "gone")
        harness.step()
        harness.step()
        acts = {
            "step": harness.step,
            "add": lambda harness=harness: harness.add("late", range(4), greedy(3)),
            "abort": lambda harness=harness: harness.engine.abort("other"),
        }
        was_reached = at_line(line, lambda harness=harness: harness.engine.abort("gone"), acts[act])
        harness.run()
        harness.check_all()
        line = line + 1 if was_reached else -1


def at_line(number: int, interruption: Callable[[], None], act: Callable[[], object]) -> bool:
    """Run `act`, and `interruption` before the line `number` of the engine; True if it has one."""
    left, before = number, sys.gettrace()

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if "/nanovllm_core/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                sys.settrace(before)
                interruption()
        return count

    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)  # a measurement of coverage goes on
    return left < 0


@pytest.mark.parametrize("salt", [None, "tenant", 7])
def test_a_cache_salt_that_is_not_bytes_is_refused(salt: object) -> None:
    """Where it is given, not in the step that would hash it: the others go on."""
    harness = Harness(Setting())
    harness.add("innocent", range(9), greedy(3))
    with pytest.raises(RequestError, match="must be bytes"):
        harness.engine.add_request("salted", [1, 2], greedy(3), cache_salt=salt)  # type: ignore[arg-type]
    harness.run()
    harness.check_all()


def test_only_streaming_requests_give_outputs_on_the_way() -> None:
    """Each token of a stream once, everything else when it is finished."""
    harness = Harness()
    harness.add("stream", [1, 2], greedy(6), stream=True, detokenizer=Letters)
    harness.add("whole", [1, 2], greedy(6), detokenizer=Letters)
    harness.run()
    harness.check_all()
    streamed = [out for out in harness.outputs if out.request_id == "stream"]
    whole = [out for out in harness.outputs if out.request_id == "whole"]
    assert len(streamed) == 6
    assert len(whole) == 1
    assert [i for out in streamed for i in out.new_token_ids] == whole[0].token_ids
    assert "".join(out.new_text for out in streamed) == whole[0].text
    assert [out.finished for out in streamed] == [False] * 5 + [True]
    assert streamed[2].token_ids == whole[0].token_ids[:3]
    assert (whole[0].new_token_ids, whole[0].new_text) == (whole[0].token_ids, whole[0].text)


def test_nothing_is_streamed_unless_it_is_asked_for() -> None:
    harness = Harness()
    harness.engine.add_request("a", [1, 2], greedy(6))
    deltas = [delta for _ in range(9) for delta in harness.engine.step()]
    assert [delta.finish_reason for delta in deltas] == ["length"]


def test_only_requests_that_python_must_look_at_are_watched_token_by_token() -> None:
    """Streams, stop strings, log-probabilities, more stop ids than the device checks."""
    harness = Harness(Setting(max_num_seqs=8, max_num_batched_tokens=64))

    def watched(name: str, stream: bool = False, **fields: Any) -> bool:
        (request,) = harness.add(name, [1], greedy(4, **fields), stream=stream, detokenizer=Letters)
        return request.is_watched

    assert not watched("plain")
    assert not watched("as many", stop_token_ids=list(range(MAX_DEVICE_STOP_IDS)))
    assert watched("one more", stop_token_ids=list(range(MAX_DEVICE_STOP_IDS + 1)))
    assert watched("stop", stop="x")
    assert watched("logprobs", logprobs=0)
    assert watched("stream", stream=True)


def test_the_ending_id_is_in_the_ids_and_not_in_the_text() -> None:
    free_ids = _free_run(6)
    end = free_ids[3]
    harness = Harness(Setting(eos_token_ids=(end,)))
    harness.add("a", [1, 2], greedy(6), detokenizer=Letters)
    harness.add("ignores", [1, 2], greedy(6, ignore_eos=True), detokenizer=Letters)
    finished = harness.run()
    cut = free_ids[: free_ids.index(end)]
    assert finished["a", 0].token_ids == [*cut, end]
    assert finished["a", 0].text == letters(cut)
    assert finished["ignores", 0].token_ids == free_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_that_leave_no_id_before_min_tokens_are_refused(ignore_eos: bool) -> None:
    """Stop ids may not come before min_tokens, and a token has to: the remedy is in the error."""
    harness, size = Harness(), Setting().vocab_size
    eos = [*harness.engine._factory.eos_token_ids]
    others = [one for one in range(size) if ignore_eos or one not in eos]
    asked = greedy(8, stop_token_ids=others, min_tokens=1, ignore_eos=ignore_eos)
    said = rf"min_tokens is 1, .* all {size} ids of the vocabulary, .*; set min_tokens to 0, or"
    with pytest.raises(InvalidSamplingError, match=said):
        harness.add("none", [1, 2], asked)
    harness.add("one", [1, 2], replace(asked, stop_token_ids=others[1:]))
    harness.add("at once", [1, 2], replace(asked, min_tokens=0))
    harness.run()
    assert harness.finished["one", 0].error is None
    assert harness.finished["at once", 0].finish_reason == "stop"


def test_padding_for_a_row_that_runs_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag it means that no id was left; without it the executor has lost the row."""
    harness = Harness(Setting(steps_ahead=0))
    harness.add("a", [1, 2], greedy(8))
    harness.step()
    monkeypatch.setattr(harness.executor, "_sample", lambda row, allowed: (PADDED, False))
    with pytest.raises(InconsistentStateError, match=r"padding for a running row: \[-1\]"):
        harness.run()


def test_min_tokens_keep_a_request_going() -> None:
    """Stop ids and stop strings count from the token that makes min_tokens."""
    free_ids = _free_run(8)
    harness = Harness()
    stop = letters(free_ids)[0]
    harness.add("ids", [1, 2], greedy(8, stop_token_ids=free_ids, min_tokens=5))
    harness.add("text", [1, 2], greedy(8, stop=stop, min_tokens=5), detokenizer=Letters)
    finished = harness.run()
    ids = finished["ids", 0]
    assert ids.token_ids == free_ids[:5]
    assert (ids.finish_reason, ids.stop_reason) == ("stop", free_ids[4])
    assert len(finished["text", 0].token_ids) >= 5
    assert stop in finished["text", 0].text


def test_the_token_that_makes_min_tokens_may_complete_a_stop_string() -> None:
    free_ids = _free_run(8)
    harness = Harness()
    params = greedy(8, stop=letters(free_ids)[4], min_tokens=5)
    harness.add("a", [1, 2], params, detokenizer=Letters)
    output = harness.run()["a", 0]
    assert (output.token_ids, output.text) == (free_ids[:5], letters(free_ids)[:4])


@pytest.mark.parametrize("order", [1, -1])
def test_of_stop_strings_that_one_token_completes_the_first_in_the_text_counts(order: int) -> None:
    text = letters(_free_run(8))
    end = next(i for i in range(2, 8) if text[i] not in text[:i])
    harness = Harness()
    stops = [text[end], text[end - 2 : end + 1]][::order]
    harness.add("a", [1, 2], greedy(8, stop=stops), detokenizer=Letters)
    output = harness.run()["a", 0]
    assert (output.text, output.stop_reason) == (text[: end - 2], text[end - 2 : end + 1])


def test_a_stop_string_that_the_last_token_completes_is_the_reason() -> None:
    """Not the length, though that is reached too."""
    text = letters(_free_run(4))
    harness = Harness()
    harness.add("a", [1, 2], greedy(4, stop=text[2:4]), detokenizer=Letters)
    output = harness.run()["a", 0]
    assert (output.finish_reason, output.stop_reason) == ("stop", text[2:4])
    assert (output.text, len(output.token_ids)) == (text[:2], 4)


class Recorded(Letters):
    calls: ClassVar[list[str]] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self.calls.append("push")
        return letters(token_ids)

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        self.calls.append("flush")
        return letters(token_ids)


def test_a_detokenizer_is_flushed_once_with_the_last_token() -> None:
    Recorded.calls.clear()
    harness = Harness()
    harness.add("a", [1, 2], greedy(4), stream=True, detokenizer=Recorded)
    harness.run()
    assert Recorded.calls == ["push"] * 3 + ["flush"]


def _free_run(max_tokens: int) -> list[int]:
    harness = Harness()
    harness.add("free", [1, 2], greedy(max_tokens))
    return harness.run()["free", 0].token_ids


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_a_stop_string_over_several_tokens_is_cut_off(steps_ahead: int) -> None:
    """Its beginning is held back from the stream; tokens after it are thrown away."""
    text = letters(_free_run(8))
    harness = Harness(Setting(steps_ahead=steps_ahead))
    for name, stream in (("stream", True), ("whole", False)):
        params = greedy(8, stop=["...", text[3:6]])
        harness.add(name, [1, 2], params, stream=stream, detokenizer=Letters)
    finished = harness.run()
    for name in ("stream", "whole"):
        output = finished[name, 0]
        assert output.text == text[:3]
        assert len(output.token_ids) == 6
        assert (output.finish_reason, output.stop_reason) == ("stop", text[3:6])
    streamed = [out for out in harness.outputs if out.request_id == "stream"]
    assert "".join(out.new_text for out in streamed) == text[:3]
    assert [len(out.text) for out in streamed] == [1, 2, 3, 3, 3, 3]


def test_what_was_held_back_comes_when_no_stop_string_follows() -> None:
    text = letters(_free_run(4))
    harness = Harness()
    params = greedy(4, stop=text[3] + "...")
    harness.add("a", [1, 2], params, stream=True, detokenizer=Letters)
    output = harness.run()["a", 0]
    assert (output.text, output.finish_reason) == (text, "length")
    assert output.new_text == text[3]


def test_logprobs_come_one_per_output() -> None:
    """Also through a preemption, and only where they were asked for."""
    harness = Harness(Setting(num_blocks=6, block_size=4))
    harness.add("a", range(8), greedy(12, logprobs=2))
    harness.add("b", range(20, 28), greedy(12, logprobs=0))
    harness.add("c", [1], greedy(2))
    finished = harness.run()
    assert harness.engine.stats.preemptions >= 1
    for name in "ab":
        output = finished[name, 0]
        assert output.logprobs is not None
        assert [-int(p.token_logprob) for p in output.logprobs] == output.token_ids
    assert finished["c", 0].logprobs is None


def test_missing_logprobs_are_an_error() -> None:
    harness = Harness()
    harness.add("a", [1], greedy(logprobs=1))
    harness.executor._reply = lambda rows, _: harness.executor.results.append(  # type: ignore[method-assign]
        StepResult(np.zeros(len(rows), np.int32), np.zeros(1, np.bool_))
    )
    with pytest.raises(InconsistentStateError, match="no logprobs for entry 0"):
        harness.step()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([1, 2], r"FakeExecutor returned .*array\(\[1, 2\].* for a step of 1"), ([-1], "padding")],
)
def test_results_that_cannot_be_are_an_error(tokens: list[int], message: str) -> None:
    """A result of the wrong size, or padding for a row that runs, is a worker's mistake."""
    harness = Harness(Setting(steps_ahead=0))
    harness.add("a", [1])
    harness.step()
    wrong = StepResult(np.array(tokens, np.int32), np.zeros(len(tokens), np.bool_))
    harness.executor._reply = lambda *_: harness.executor.results.append(wrong)  # type: ignore[method-assign]
    with pytest.raises(InconsistentStateError, match=message):
        harness.step()


@pytest.mark.parametrize("wrong", [None, 5, "tokens"])
def test_what_is_no_result_is_an_error_that_names_the_executor(wrong: object) -> None:
    harness = Harness(Setting(steps_ahead=0))
    harness.add("a", [1])
    harness.executor._reply = lambda *_: harness.executor.results.append(wrong)  # type: ignore[method-assign,arg-type]
    with pytest.raises(InconsistentStateError, match=f"FakeExecutor returned {wrong!r}"):
        harness.step()


def test_seeds_are_derived_where_none_is_given() -> None:
    """From the engine's seed and the arrival, or the request's seed and the sample."""
    harness = Harness()
    none = harness.add("none", [1], SamplingParams(max_tokens=2))
    other = harness.add("other", [1], SamplingParams(max_tokens=2))
    given = harness.add("given", [1], SamplingParams(max_tokens=2, seed=7, n=3))
    seeds = [request.sampling.seed for request in (*none, *other, *given)]
    assert len(set(seeds)) == 5
    assert seeds[0] == derive_seed(0, 0)
    assert seeds[2:] == [7, derive_seed(7, 1), derive_seed(7, 2)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)


def test_samples_differ_and_a_seed_repeats_them() -> None:
    outputs = []
    for _ in range(2):
        harness = Harness()
        harness.add("a", range(6), SamplingParams(temperature=1, seed=5, n=3, max_tokens=6))
        finished = harness.run()
        harness.check_all()
        outputs.append([finished["a", index].token_ids for index in range(3)])
    assert outputs[0] == outputs[1]
    assert len({tuple(ids) for ids in outputs[0]}) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_returns_what_it_had(stream: bool) -> None:
    """Its ids and its text so far, with the true reason."""
    harness = Harness()
    harness.add("a", [1, 2], greedy(20), stream=stream, detokenizer=Letters)
    for _ in range(4):
        harness.step()
    harness.engine.abort("a")
    output = harness.run()["a", 0]
    assert output.finish_reason == "abort"
    assert output.token_ids == _free_run(20)[:4]
    assert output.text == letters(output.token_ids)


def test_stats_say_how_things_stand() -> None:
    harness = Harness(Setting(max_num_seqs=2))
    for i in range(3):
        harness.add(f"r{i}", [i], greedy(4))
    assert (harness.engine.stats.running, harness.engine.stats.waiting) == (0, 3)
    harness.step()
    assert (harness.engine.stats.running, harness.engine.stats.waiting) == (2, 1)
    harness.run()
    stats = harness.engine.stats
    assert (stats.output_tokens, stats.finished, stats.running, stats.waiting) == (12, 3, 0, 0)
    assert (stats.preemptions, stats.prefix_hit_tokens) == (0, 0)
    assert stats.blocks == stats.free_blocks == harness.setting.num_blocks
    assert stats.steps == len(harness.executor.plans)
    assert 0 < stats.host_seconds < 10


def test_host_seconds_leave_out_the_wait_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    (request,) = harness.add("a", [1], greedy(4))
    collect = harness.executor.collect

    def slow() -> StepResult:
        time.sleep(0.02)
        return collect()

    monkeypatch.setattr(harness.executor, "collect", slow)
    began = time.perf_counter()
    harness.run()
    taken = time.perf_counter() - began
    assert harness.engine.stats.host_seconds <= taken - 4 * 0.02
    assert request.num_tokens == 5, "a request that has ended still knows its ids"


def test_outputs_say_how_long_the_request_waited() -> None:
    """In steps, from the arrival to the first admission; None if it was never admitted."""
    harness = Harness(Setting(max_num_seqs=1, steps_ahead=0))
    for name in ("a", "b", "gone"):
        harness.add(name, [1, 2], greedy(4))
    harness.engine.abort("gone")
    finished = harness.run()
    waits = [finished[name, 0].wait_steps for name in ("a", "b", "gone")]
    assert waits == [0, 4, None]


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_an_interrupted_wait_can_be_taken_up_again(
    steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while waiting for the device loses no step: every token still comes."""
    harness = Harness(Setting(steps_ahead=steps_ahead))
    harness.add("a", [1, 2, 3], greedy(12))
    harness.step()
    collect = harness.executor.collect

    def interrupted() -> StepResult:
        monkeypatch.setattr(harness.executor, "collect", collect)
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.executor, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    harness.run()
    harness.check_all()


def test_an_interrupt_in_the_middle_of_the_work_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a step is no state to go on from."""
    harness = Harness(Setting())
    harness.add("a", [1, 2, 3], greedy(12))

    def interrupted(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    with pytest.raises(EngineClosedError, match="ended with KeyboardInterrupt"):
        harness.engine.step()


@pytest.mark.parametrize("stream", [False, True])
def test_a_delta_holds_only_what_is_new(stream: bool) -> None:
    """Ids and log-probabilities of all deltas, one behind the other, are those of the output."""
    harness = Harness(Setting(num_blocks=6, block_size=4))
    for name, start in (("a", 0), ("b", 20)):
        harness.engine.add_request(
            name, range(start, start + 8), greedy(12, logprobs=1), stream=stream
        )
    deltas = [delta for _ in range(60) for delta in harness.engine.step()]
    assert harness.engine.stats.preemptions >= 1
    for name in "ab":
        mine = [delta for delta in deltas if delta.request_id == name]
        assert len(mine) == (12 if stream else 1)
        ids = [token_id for delta in mine for token_id in delta.new_token_ids]
        logprobs = [one for delta in mine for one in delta.new_logprobs or ()]
        assert len(ids) == 12
        assert [-int(one.token_logprob) for one in logprobs] == ids
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]


def test_deltas_that_are_joined_are_those_of_an_output_at_once() -> None:
    """As where a caller is slower than the engine: ids, log-probabilities, and the end."""
    streamed, whole = Harness(), Harness()
    for harness, stream in ((streamed, True), (whole, False)):
        harness.engine.add_request("a", [1, 2], greedy(9, logprobs=1), stream=stream)
    first, *later = (delta for _ in range(12) for delta in streamed.engine.step())
    assert len(later) == 8
    for delta in later:
        first.extend(delta)
    [expected] = (delta for _ in range(12) for delta in whole.engine.step())
    assert first == expected


def test_a_request_that_was_left_no_id_is_told_by_what() -> None:
    """The device says -1; any other id is taken."""
    params = greedy(8, min_tokens=2, stop_token_ids=(5,))
    [request] = Harness().add("a", [1, 2], params)
    assert request.refused(3) is None
    error = request.refused(PADDED)
    assert isinstance(error, InvalidSamplingError)
    assert "min_tokens left no id to choose after" in str(error)


def test_outputs_that_a_request_goes_on_behind_belong_to_one_sample() -> None:
    with pytest.raises(RequestError, match="2 output_token_ids for n=2 samples"):
        Harness().engine.add_request("a", [1, 2], greedy(8, n=2), output_token_ids=[3, 4])


def test_an_executor_that_finds_logits_of_no_number_names_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(plan: StepPlan) -> None:
        raise ModelOutputError("NaN", rows=[admission.row for admission in plan.admissions])

    harness = Harness()
    monkeypatch.setattr(harness.executor, "submit", broken)
    harness.add("asks", [1, 2])
    with pytest.raises(ModelOutputError, match="request asks, NaN"):
        harness.engine.step()


def test_deltas_survive_encoding() -> None:
    harness = Harness()
    harness.engine.add_request("a", [1, 2], greedy(4, logprobs=1), stream=True)
    deltas = [delta for _ in range(9) for delta in harness.engine.step()]
    assert pickle.loads(pickle.dumps(deltas)) == deltas


class Records(StepObserver):
    """Keeps the records of finished requests."""

    def __init__(self) -> None:
        self.finished: list[RequestRecord] = []

    def on_step(self, record: StepRecord) -> None: ...

    def on_request_finished(self, record: RequestRecord) -> None:
        self.finished.append(record)


@pytest.mark.parametrize("late", [0, 1, 2, 9])
def test_a_stop_string_that_is_found_late_ends_the_request_where_it_stands(late: int) -> None:
    """The engine may have gone on, or even finished: the record counts as the caller does."""
    records = Records()
    harness = Harness(observation=Observation({"records": records}))
    harness.engine.add_request("a", [1, 2], greedy(8, stop="x"), searched=True)
    for _ in range(3 + late):
        harness.engine.step()
    assert not records.finished
    harness.engine.end_at("a", 0, 3, "x")
    assert harness.engine.stats.free_blocks == harness.setting.num_blocks
    (record,) = records.finished
    assert (record.finish_reason, record.num_output_tokens) == ("stop", 3)
    deltas = harness.engine.step()
    if late < 6:
        assert [(d.finish_reason, d.stop_reason, d.new_token_ids) for d in deltas] == [
            ("stop", "x", [])
        ]
    for _ in range(3):
        harness.engine.step()
    assert not harness.engine.has_unfinished()
    harness.engine.end_at("a", 0, 3, "x")  # once is enough
    assert len(records.finished) == 1


def test_a_searched_request_without_a_stop_string_keeps_its_reason() -> None:
    records = Records()
    harness = Harness(observation=Observation({"records": records}))
    harness.add("whole", [1, 2], greedy(4, stop="..."), detokenizer=Letters)
    harness.engine.add_request("gone", [1, 2], greedy(4, stop="x"), searched=True)
    harness.engine.add_request("aborted", [1, 2], greedy(20, stop="x"), searched=True)
    for name in ("gone", "aborted"):
        harness._streams[name, 0] = SimpleNamespace(push=lambda _: None)  # type: ignore[assignment]
    for _ in range(9):
        harness.step()
    assert [record.request_id for record in records.finished] == ["whole"]
    harness.engine.abort("gone")  # it has finished, and nobody searches its text any more
    harness.engine.abort("aborted")
    harness.engine.end_at("aborted", 0, 3, "x")  # too late
    harness.engine.step()
    found = {record.request_id: record.finish_reason for record in records.finished}
    assert found == {"whole": "length", "gone": "length", "aborted": "abort"}
