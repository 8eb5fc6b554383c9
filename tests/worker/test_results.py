"""Results reach the host complete, in order, and once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from itertools import permutations
from random import Random
from time import perf_counter
from typing import NoReturn

import numpy as np
import pytest
import torch

from nanovllm_core.errors import ExecutorError
from nanovllm_core.worker.polling import StepWait
from nanovllm_core.worker.results import ResultRing

CPU = torch.device("cpu")


def write(ring: ResultRing, slot: int, tag: int, entries: list[tuple[int, int]]) -> None:
    """What the device does at the end of a step."""
    words = [(tag << 32) | ((token + 1) << 1) | ended for token, ended in entries]
    ring.words[slot, : len(words)] = torch.tensor(words)


def test_a_result_is_read_from_the_slot_of_its_step() -> None:
    """Two steps in flight come back in order; -1 stands for padding."""
    ring = ResultRing(CPU, 3, num_slots=2)
    ring.push(2)
    ring.push(3)
    write(ring, 1, 2, [(7, 0), (8, 1), (-1, 0)])
    write(ring, 0, 1, [(5, 1), (0, 0)])
    first, second = ring.collect(), ring.collect()
    assert first.token_ids.tolist() == [5, 0]
    assert first.finished.tolist() == [True, False]
    assert second.token_ids.tolist() == [7, 8, -1]
    assert second.finished.tolist() == [False, True, False]


def test_a_result_outlives_its_slot() -> None:
    """What was collected does not change when the slot is written again."""
    ring = ResultRing(CPU, 1, num_slots=1)
    ring.push(1)
    write(ring, 0, 1, [(5, 0)])
    result = ring.collect()
    write(ring, 0, 2, [(9, 1)])
    assert result.token_ids.tolist() == [5]
    assert result.finished.tolist() == [False]


def test_only_the_entries_that_were_asked_for_are_reported() -> None:
    """A prompt's unfinished chunk has a word but no token."""
    ring = ResultRing(CPU, 3, num_slots=1)
    ring.push(3, entries=np.array([0, 2]))
    write(ring, 0, 1, [(5, 0), (-1, 0), (6, 1)])
    assert ring.collect().token_ids.tolist() == [5, 6]


def test_a_device_that_stops_without_a_result_is_an_error() -> None:
    """The host does not wait for ever; a word of an earlier step is not taken for this one's."""
    ring = ResultRing(CPU, 1, num_slots=1)
    write(ring, 0, 7, [(5, 0)])
    ring.push(1)
    with pytest.raises(ExecutorError, match="left no result"):
        ring.collect()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_step_is_done_when_its_last_word_has_come_whichever_that_is(
    order: tuple[int, ...],
) -> None:
    """Words are written in any order; those of the step before lie where they are not yet."""
    ring = ResultRing(CPU, 3, num_slots=1)
    write(ring, 0, 7, [(1, 0), (2, 0), (3, 0)])
    ring.push(3)
    (step,) = ring._pending
    for count, place in enumerate(order):
        assert not step.is_done(), f"{count} of 3 words have come"
        ring.words[0, place] = (1 << 32) | ((place + 5) << 1)
    assert step.is_done()
    assert ring.collect().token_ids.tolist() == [4, 5, 6]


def test_a_step_that_ends_between_the_last_look_and_the_question_is_no_error() -> None:
    """The device is idle because it has finished."""
    ring = ResultRing(CPU, 1, num_slots=1)
    ring.push(1)

    def ask_late(
        _kind: object, _launched: float, is_done: Callable[[], bool], check: Callable[[], None]
    ) -> None:
        assert not is_done()
        write(ring, 0, 1, [(5, 0)])
        check()

    ring.wait = ask_late
    assert ring.collect().token_ids.tolist() == [5]


def test_steps_that_the_device_waited_for_are_counted() -> None:
    """A step is late if the one in flight was done before; with none in flight none is late."""
    ring = ResultRing(CPU, 1, num_slots=2)
    ring.push(1)
    assert (ring.num_late, ring.num_overlapped) == (0, 0)
    ring.push(1)
    assert (ring.num_late, ring.num_overlapped) == (0, 1)
    write(ring, 0, 1, [(5, 0)])
    write(ring, 1, 2, [(6, 0)])
    ring.collect()
    ring.push(1)
    assert (ring.num_late, ring.num_overlapped) == (1, 2)
    ring.reset()
    assert (ring.num_late, ring.num_overlapped) == (0, 0)


def test_more_steps_than_slots_are_refused() -> None:
    """A slot that was not read is never written again."""
    ring = ResultRing(CPU, 1, num_slots=2)
    ring.push(1)
    ring.push(1)
    with pytest.raises(ExecutorError, match="2 steps are in flight"):
        ring.push(1)


def test_collecting_without_a_step_is_an_error() -> None:
    """There is nothing to wait for."""
    with pytest.raises(ExecutorError, match="no step is in flight"):
        ResultRing(CPU, 1, num_slots=1).collect()


def test_a_reset_ring_counts_from_the_beginning() -> None:
    """Steps that a capture ran leave nothing behind."""
    ring = ResultRing(CPU, 1, num_slots=2)
    ring.num_finished += 5
    ring.push(1)
    ring.reset()
    ring.push(1)
    write(ring, 0, 1, [(3, 0)])
    assert ring.collect().token_ids.tolist() == [3]
    assert ring.num_finished == 0


def test_an_interrupted_wait_leaves_the_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while looking: the same result is there to be collected afterwards."""
    ring = ResultRing(CPU, 1, num_slots=1)
    ring.push(1)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    wait, ring.wait = ring.wait, StepWait(sleep=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(ring, "_is_idle", lambda: False)
        with pytest.raises(KeyboardInterrupt):
            ring.collect()
    ring.wait = wait
    write(ring, 0, 1, [(3, 0)])
    assert ring.collect().token_ids.tolist() == [3]


def test_no_interrupt_takes_a_result_with_it(alarm: Callable[[float], None]) -> None:
    """Wherever in `collect` a Ctrl-C comes, the step is there or was returned."""
    ring, lost, interrupted = ResultRing(CPU, 1, num_slots=1), 0, 0
    random = Random(0)
    began = perf_counter()
    while perf_counter() < began + 0.5:
        ring.push(1)
        ring._host[0, 0] = (ring._num_pushed << 32) | (6 << 1)
        result = None
        try:
            alarm(random.uniform(5e-6, 30e-6))
            result = ring.collect()
            alarm(0)
        except KeyboardInterrupt:
            interrupted += 1
        if result is None:
            lost += not ring._pending
            ring.reset()
    assert interrupted > 100, "no interrupt came while a result was collected"
    assert lost == 0


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Sets when the next KeyboardInterrupt comes (0: never); whoever used the timer has it back."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("this platform has no interval timer")

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def arm(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    trace = sys.gettrace()
    sys.settrace(None)  # an interrupt inside coverage's tracer would leave its lock held
    before = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield arm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
        sys.settrace(trace)
