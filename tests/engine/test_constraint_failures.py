"""A constraint that fails, is late or allows nothing ends requests, and never the engine."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nanovllm_core.engine import LoadedConstraint, constraints
from nanovllm_core.engine.constraints import MAX_THREADS, Filling, MaskFiller, SampleConstraints
from nanovllm_core.errors import (
    InvalidSamplingError,
    ModelOutputError,
    NanoVLLMError,
    PluginFailedError,
)
from nanovllm_core.interfaces.specs import NoOptions

from .rising import RELEASE, VOCAB, Rising, Step, check, loaded, make, params

FAILURES = {
    "start": (0, r"constraint 'rising': start failed: KeyError: 'no start'; only this request"),
    "advance": (3, r"constraint 'rising': advance failed: ValueError: no third"),
    "fill": (2, r"constraint 'rising': fill failed: SystemExit: no mask"),
    "hang": (2, r"constraint 'rising': fill has not returned, .* within 0.2 s, .*or raise limits"),
    "wordless": (2, r"constraint 'rising': fill failed: Wordless; only this request ends"),
}
UNMET = {
    "nothing": (
        2,
        r"^constraints: constraint 'rising' allowed none of the 50 ids after 2 of the output; ask",
    ),
    "beyond": (2, r"allowed none of the 50 ids"),
}


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("fails", [*FAILURES, *UNMET])
def test_a_constraint_that_fails_ends_its_own_request_alone(fails: str, steps_ahead: int) -> None:
    """The error is the plugin's where a call fails, and the request's where no id may follow.

    The engine goes on, with requests of the same constraint too.
    """
    RELEASE.clear()
    num_ids, said = {**FAILURES, **UNMET}[fails]
    kind: type[NanoVLLMError] = InvalidSamplingError if fails in UNMET else PluginFailedError
    harness = make(seconds=0.2, steps_ahead=steps_ahead)
    harness.add("before", [1], params(4, "slow"))
    harness.add("fails", [2], params(3, fails))
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
    assert isinstance(output.error, kind)
    with pytest.raises(kind, match=said):
        raise output.error
    others = [one for key, one in harness.finished.items() if key != ("fails", 0)]
    assert {(one.finish_reason, one.error) for one in others} == {("length", None)}


def test_calls_that_hang_end_their_own_requests_and_a_step_waits_about_once() -> None:
    """However many there are: masks of other requests, before and behind them, are made."""
    RELEASE.clear()
    harness = make(seconds=0.3, max_num_seqs=32, num_blocks=128)
    for number in range(8):
        harness.add(f"good {number}", [number + 1], params(3))
        harness.add(f"hangs {number}", [number + 1], params(3, "hang"))
    harness.add("free", [4], params(None))
    started = time.perf_counter()
    harness.run()
    assert time.perf_counter() - started < 1.5
    RELEASE.set()
    check(harness)
    for (name, _), output in harness.finished.items():
        assert output.finish_reason == ("error" if "hangs" in name else "length"), name
        assert (output.error is None) is ("hangs" not in name)


def test_masks_that_are_slow_together_end_nobody() -> None:
    """Each has its own time, and that of others does not count."""
    harness = make(seconds=0.3, max_num_seqs=32, num_blocks=128)
    for number in range(31):
        harness.add(str(number), [number + 1], params(3, "slow"))
    harness.run()
    check(harness)
    assert {one.finish_reason for one in harness.finished.values()} == {"length"}


def test_one_request_keeps_one_thread_whatever_its_samples_do() -> None:
    """Those that wait while one is slow end with it: 16 of them would leave no thread to others."""
    RELEASE.clear()
    harness = make(seconds=0.2, max_num_seqs=32, num_blocks=128)
    harness.add("hangs", [1], params(3, "hang", n=20))
    harness.add("good", [2], params(3))
    harness.run()
    harness.add("later", [3], params(3))
    harness.run()
    assert len(harness.engine._masking._filler._stuck) == 1
    RELEASE.set()
    check(harness)
    errors = [output.error for (name, _), output in harness.finished.items() if name == "hangs"]
    assert len(errors) == 20 == sum(isinstance(one, PluginFailedError) for one in errors)
    assert len({id(one) for one in errors}) == 20, "each is raised by another caller"
    for name in ("good", "later"):
        assert harness.finished[name, 0].finish_reason == "length"


def test_a_slow_mask_that_comes_in_time_lets_the_other_samples_follow() -> None:
    """Those of its request wait for it, and no other request does."""
    harness = make(seconds=2.0, max_num_seqs=8, num_blocks=128)
    harness.add("slow", [1], params(3, "slower", n=3))
    harness.add("good", [2], params(3))
    harness.run()
    check(harness)
    assert {one.finish_reason for one in harness.finished.values()} == {"length"}


def test_a_call_that_stops_every_thread_counts_for_no_mask() -> None:
    """It holds Python's lock, as an extension may. The engine stops too, and nobody is late."""
    harness = make(seconds=0.2)
    harness.add("good", [1], params(3, "slow"))
    harness.add("stops", [2], params(3, "lock"))
    harness.add("behind", [3], params(3, "slow"))
    harness.run()
    check(harness)
    assert {one.finish_reason for one in harness.finished.values()} == {"length"}


def test_masks_wait_for_a_slow_one_only_while_it_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look may come too late and note a request whose mask is there: the next one sees it."""
    make_batch = constraints._Batch.__init__

    def noted(batch: Any, fillings: Any) -> None:
        make_batch(batch, fillings)
        batch.slow = {"good"}

    monkeypatch.setattr(constraints._Batch, "__init__", noted)
    harness = make(seconds=0.2)
    harness.add("good", [1], params(3, max_tokens=2, n=2))
    harness.run()
    check(harness)


def test_threads_that_are_stuck_are_bounded() -> None:
    """Beyond the limit no further constraint is called, and requests without one go on."""
    RELEASE.clear()
    harness = make(seconds=0.02)
    for number in range(MAX_THREADS + 1):
        harness.add(str(number), [number + 1], params(3, "hang"))
        harness.add(f"free {number}", [4], params(None))
        harness.run()
    errors = [str(one.error) for one in harness.finished.values() if one.error]
    assert sum("has not returned, and a mask must" in one for one in errors) == MAX_THREADS
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
    """Neither of its own sample's next constraint, nor of its request's further samples."""
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
    errors = filler.fill([Filling(sample, [], "one request") for sample in samples])
    assert all("noted: start has not returned" in str(error) for error in errors)
    RELEASE.set()
    [thread] = filler._stuck
    thread.join(5.0)
    assert calls == ["start 1"]


def test_the_thread_is_kept_and_ends_with_its_engine() -> None:
    harness = make()
    harness.add("a", [1], params(3))
    harness.run()
    [thread] = harness.engine._masking._filler._threads
    harness.add("b", [2], params(3))
    harness.run()
    assert harness.engine._masking._filler._threads == [thread]
    assert thread.is_alive()
    del harness
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


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
    assert isinstance(output.error, InvalidSamplingError)
    assert str(output.error) == (
        "constraints: min_tokens or a logits processor of the request forbids every id that "
        "constraint 'rising' allowed after 0 of the output; change one of them"
    )


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
