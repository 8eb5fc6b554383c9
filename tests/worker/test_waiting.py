"""The host sleeps through a step and is awake when it ends."""

from __future__ import annotations

import pytest

from nanovllm_core.worker.polling import LOOKING_SECONDS, NAP_SECONDS, StepWait

LOOK_SECONDS = 1e-6


class Device:
    """A clock, and steps that end at their time; every look takes a microsecond."""

    def __init__(self) -> None:
        self.now = 1.0
        self.ends = 0.0
        self.slept = 0.0
        self.checks = 0
        self.wait = StepWait(clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds

    def is_done(self) -> bool:
        self.now += LOOK_SECONDS
        return self.now >= self.ends

    def check(self) -> None:
        self.checks += 1

    def step(self, seconds: float, kind: str = "decode") -> float:
        """Wait for a step launched now; returns how late its end was noticed."""
        self.slept = 0.0
        launched = self.now
        self.ends = launched + seconds
        self.wait(kind, launched, self.is_done, self.check)
        return self.now - self.ends


@pytest.mark.parametrize("seconds", [0.001, 0.006, 0.03])
def test_a_steady_step_is_slept_through_and_its_end_is_seen_at_once(seconds: float) -> None:
    """After a few steps of the same length: late by a look or two, awake for a moment only."""
    device = Device()
    for _ in range(20):
        device.step(seconds)
    assert device.step(seconds) < 5 * LOOK_SECONDS
    assert seconds - device.slept < 2 * LOOKING_SECONDS


def test_a_wrong_prediction_costs_one_nap() -> None:
    """Long steps of prompts, then short ones: no step is noticed later than a nap after its end."""
    device = Device()
    for seconds in (0.1, 0.1, 0.1, 0.002, 0.0005, 0.02, 0.001):
        assert device.step(seconds) <= NAP_SECONDS + 5 * LOOK_SECONDS, seconds


def test_steps_of_two_kinds_by_turns_are_each_seen_at_once() -> None:
    """A long step with prompts between short ones: neither's time is taken for the other's."""
    device = Device()
    turns = (("decode", 0.0005), ("decode", 0.0005), ("prompts", 0.0015), ("long prompts", 0.02))
    for _ in range(3):
        for kind, seconds in turns:
            device.step(seconds, kind)
    for kind, seconds in turns:
        assert device.step(seconds, kind) < 5 * LOOK_SECONDS, kind


def test_a_step_that_is_there_is_not_slept_for() -> None:
    """Where the host was late the result is taken at once."""
    device = Device()
    for _ in range(5):
        device.step(0.005)
    assert device.step(0.0) < 5 * LOOK_SECONDS
    assert device.slept == 0


def test_a_step_behind_another_is_expected_after_that_one() -> None:
    """Two steps in flight, launched together: the second takes its time from the first's end."""
    device = Device()
    for _ in range(20):
        device.step(0.004)
    launched = device.now
    for end in (0.004, 0.008):
        device.ends, device.slept = launched + end, 0.0
        device.wait("decode", launched, device.is_done, device.check)
        assert 0.004 - 2 * LOOKING_SECONDS < device.slept < 0.004


def test_an_overdue_step_is_asked_about_between_naps() -> None:
    """The first long step: the host asks whether it can still end, and other threads may run."""
    device = Device()
    device.step(0.01)
    assert 0.005 / NAP_SECONDS < device.checks < 0.01 / NAP_SECONDS


def test_what_the_check_raises_ends_the_wait() -> None:
    device = Device()
    device.ends = float("inf")

    def check() -> None:
        raise RuntimeError("the device stopped")

    with pytest.raises(RuntimeError, match="the device stopped"):
        device.wait("decode", device.now, device.is_done, check)


def test_a_pause_of_the_host_is_not_taken_for_a_long_step() -> None:
    """A step is collected after an hour's pause; a device that then dies is soon noticed."""
    device = Device()
    for _ in range(20):
        device.step(0.002)
    launched, device.ends = device.now, device.now + 0.002
    device.now += 3600
    device.wait("decode", launched, device.is_done, device.check)
    began, device.ends = device.now, float("inf")

    def check() -> None:
        raise RuntimeError("dead")

    with pytest.raises(RuntimeError, match="dead"):
        device.wait("decode", began, device.is_done, check)
    assert device.now - began < 0.05
