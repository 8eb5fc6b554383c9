"""From deltas to outputs: each token is copied once, whatever a caller keeps."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from random import Random
from time import process_time
from types import ModuleType

import pytest
import rich.progress
from hypothesis import given, strategies as st

from nanovllm_core.engine import OutputDelta
from nanovllm_core.frontend import OutputStream, RequestOutput, Transcript
from nanovllm_core.frontend.llm import progress_bar
from nanovllm_core.frontend.outputs import _StopStrings
from nanovllm_core.interfaces.plan import TokenLogprobs
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Letters, Setting, letters

Ends = list[tuple[str, int, int, str | None]]


def delta(ids: Sequence[int], reason: str | None = None, stop: int | None = None) -> OutputDelta:
    return OutputDelta(
        request_id="a", index=0, new_token_ids=list(ids), finish_reason=reason, stop_reason=stop
    )  # type: ignore[arg-type]  # a reason


def stream_of(ends: Ends, **fields: object) -> OutputStream:
    params = SamplingParams(temperature=0, **fields)  # type: ignore[arg-type]
    return OutputStream([1], params, Letters(), lambda *end: ends.append(end))


def bytes_of_a_stream(num_tokens: int, num_read: int) -> tuple[int, int]:
    """What the engine handed out, and what the caller got, while it read `num_read` whole texts."""
    harness = Harness(
        Setting(max_model_len=4200, num_blocks=70, block_size=64, max_num_batched_tokens=64),
        debug=False,
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0)
    harness.add("a", [1, 2], params, stream=True, detokenizer=Letters)
    step, deltas, copied = harness.engine.step, 0, 0

    def counting() -> list[OutputDelta]:
        nonlocal deltas
        handed_out = step()
        deltas += sum(len(pickle.dumps(one)) for one in handed_out)
        return handed_out

    harness.engine.step = counting  # type: ignore[method-assign]
    while harness.engine.has_unfinished():
        for output in harness.step():
            assert not {"token_ids", "text", "logprobs"} & vars(output).keys(), "nobody read them"
            if output.num_token_ids <= num_read:
                assert len(output.text) == len(output.token_ids) == output.num_token_ids
            held = {name: one for name, one in vars(output).items() if name != "transcript"}
            copied += len(pickle.dumps(held))
        harness.outputs.clear()
    assert [*harness.finished] == [("a", 0)]
    assert len(harness.finished["a", 0].token_ids) == num_tokens
    return deltas, copied


def test_a_stream_of_4000_tokens_copies_each_token_once() -> None:
    """Four times the tokens are four times the bytes; all so far in every output would be 16."""
    few, many = bytes_of_a_stream(1000, 0), bytes_of_a_stream(4000, 0)
    for less, more in zip(few, many, strict=True):
        assert 3.9 < more / less < 4.2
    read = bytes_of_a_stream(1000, 1000)
    assert read[1] > 5 * few[1], "the bytes of texts that are read are counted"


@pytest.mark.parametrize("seed", range(20))
def test_an_output_is_a_snapshot_however_the_sample_goes_on(seed: int) -> None:
    """Of ids, text and log-probabilities; read at once or when all is over, in any order."""
    rng = Random(seed)
    stream, outputs, ids = stream_of([], logprobs=0, max_tokens=99), [], []
    for step in range(20):
        new = [rng.randrange(50) for _ in range(rng.randint(0, 3))]
        ids += new
        logprobs = [TokenLogprobs(-float(one), ()) for one in new]
        last = "length" if step == 19 else None
        output = stream.push(
            OutputDelta(
                request_id="a",
                index=0,
                new_token_ids=new,
                new_logprobs=logprobs,
                finish_reason=last,  # type: ignore[arg-type]
            )
        )
        assert output is not None
        outputs.append((output, [*ids]))
        if rng.random() < 0.3:
            assert output.token_ids == ids
    rng.shuffle(outputs)
    for output, known in outputs:
        assert output.token_ids == known
        assert output.text == letters(known)
        assert output.logprobs == [TokenLogprobs(-float(one), ()) for one in known]
        assert output.token_ids is output.token_ids


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_ends_the_text_however_its_ids_come(seed: int) -> None:
    """One id at a time or several, with whatever the engine computed beyond it."""
    rng = Random(seed)
    ids = [rng.randrange(3) for _ in range(30)]
    stops = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(2)]
    least = rng.randrange(12)
    end = next(
        (n for n in range(max(1, least), 31) for s in stops if letters(ids[:n]).endswith(s)), None
    )
    ends: Ends = []
    stream, outputs, left = stream_of(ends, stop=stops, min_tokens=least, max_tokens=30), [], ids
    while left:
        size = rng.randint(1, 4)
        new, left = left[:size], left[size:]
        output = stream.push(delta(new, None if left else "length"))
        outputs += [output] if output else []
    last = outputs[-1]
    assert "".join(output.new_text for output in outputs) == last.text
    assert [one for output in outputs for one in output.new_token_ids] == last.token_ids
    if end is None:
        assert (last.text, last.finish_reason) == (letters(ids), "length")
        assert ends == [("a", 0, 30, None)]
    else:
        stop = last.stop_reason
        assert isinstance(stop, str)
        assert (last.token_ids, last.finish_reason) == (ids[:end], "stop")
        assert letters(ids[:end]).startswith(last.text + stop)
        assert ends == [("a", 0, end, stop)]


@given(
    strings=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6),
    text=st.text("abc", max_size=12),
    start=st.integers(0, 12),
)
def test_stop_strings_are_found_as_if_each_was_looked_for(
    strings: list[str], text: str, start: int
) -> None:
    """The first that ends behind `start`; and the most that may be the beginning of one."""
    index = _StopStrings(tuple(strings))
    found = [
        (at, place)
        for place, string in enumerate(strings)
        if (at := text.find(string, max(0, start - len(string) + 1))) >= 0
    ]
    first = min(found, default=None)
    assert index.find(text, start) == (first and (first[0], strings[first[1]]))
    begun = [
        size for string in strings for size in range(1, len(string)) if text.endswith(string[:size])
    ]
    assert index.num_begun(text) == max(begun, default=0)


def test_a_thousand_stop_strings_hardly_cost_more_than_one() -> None:
    """Each sample of a request looks for all of them at every token, on the thread of all."""
    strings = [chr(0x4E00 + place) * 2 for place in range(1024)]
    seconds = []
    for stop in (strings[:1], strings):
        stream = stream_of([], stop=stop, max_tokens=None)
        began = process_time()
        for _ in range(2000):
            stream.push(delta([2]))
        seconds.append(process_time() - began)
    assert seconds[1] < 4 * seconds[0] + 0.05


def test_an_abort_gives_out_what_was_held_back() -> None:
    ends: Ends = []
    stream = stream_of(ends, stop="bcd")
    first, last = stream.push(delta([0, 1, 2])), stream.push(delta([], "abort"))
    assert first is not None
    assert last is not None
    assert (first.text, last.new_text, last.text) == ("a", "bc", "abc")
    assert (last.finish_reason, ends) == ("abort", [("a", 0, 3, None)])


def test_an_output_answers_as_nano_vllms_do() -> None:
    output = RequestOutput(
        request_id="a",
        index=0,
        prompt_token_ids=[1],
        new_token_ids=[2],
        num_token_ids=1,
        num_texts=1,
        transcript=Transcript([2], ["t"]),
    )
    assert (output["text"], output["token_ids"], output.finished) == ("t", [2], False)
    with pytest.raises(KeyError, match="'text' and 'token_ids'"):
        output["prompt"]


@pytest.mark.parametrize("notebook", [False, True])
def test_a_progress_bar_is_shown_in_a_notebook_too(
    notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr is no terminal; where nobody wants it, or looks, rich is not even imported."""
    shown: list[bool] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    monkeypatch.setattr(rich.progress.Progress, "start", lambda bar: shown.append(not bar.disable))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rich.progress", None)
        for wanted in (True, False):
            with progress_bar(2, wanted) as advance:
                advance()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    for wanted in (True, False):
        with progress_bar(2, wanted) as advance:
            advance()
    assert shown == [notebook]


def test_a_long_stop_string_costs_as_much_as_the_text_that_may_begin_it() -> None:
    """The door looks for it at every token, so its own length must not count."""
    stream = stream_of([], stop=["ab" * 250_000], max_tokens=None)
    began = process_time()
    for _ in range(20):
        stream.push(delta([5]))
    assert process_time() - began < 1.0
