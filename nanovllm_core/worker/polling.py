"""How the host waits for a step: asleep while it cannot be done, looking when it may be.

Looking all the time would keep a core busy, which slows the other cores and takes the interpreter
from other threads; and whatever asks the operating system between two looks costs more than a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

NAP_SECONDS = 200e-6
"""The longest sleep between two looks: what a wait can be late by, whatever was predicted."""

LOOKING_SECONDS = 300e-6
"""From this long before a step is due to this long after, looks follow without a sleep."""

_LOOKS_PER_READING = 64
"""Looks between two readings of the clock."""

Wait = Callable[[Hashable, float, Callable[[], bool], Callable[[], None]], None]
"""`wait(kind, launched, is_done, check)`, as `StepWait` has it."""


class StepWait:
    """Predicts from steps of the same kind when the next is done, and sleeps until shortly before.

    A step takes its time from its launch or, where the device was still busy, from the end of the
    step before. A prediction that is wrong (the first of a kind, longer contexts) costs one nap at
    most: the device does not wait where another step is in flight behind this one, but the result
    is that much later.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._seconds: dict[Hashable, float] = {}
        self._last_done = 0.0

    def __call__(
        self,
        kind: Hashable,
        launched: float,
        is_done: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        """Return once `is_done()`. `launched` is when the step was submitted, by the same clock.

        Steps of one `kind` take about the same time. A step that is overdue is asked about: `check`
        raises where it can never be done.
        """
        was_done = is_done()
        began = max(launched, self._last_done)
        expected = self._seconds.get(kind, 0.0)
        due = began + expected
        while (left := due - LOOKING_SECONDS - self._clock()) > 0 and not is_done():
            self._sleep(min(left, NAP_SECONDS))
        looks = 0
        while not is_done():
            looks += 1
            if looks % _LOOKS_PER_READING == 0 and self._clock() > due + LOOKING_SECONDS:
                check()
                self._sleep(NAP_SECONDS)
        self._last_done = self._clock()
        if not was_done:  # else it may have been done long ago
            taken = self._last_done - began
            self._seconds[kind] = expected + (taken - expected) / 4 if expected else taken
