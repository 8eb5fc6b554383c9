"""The bounded queue: how many samples may run and wait at one time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import retry_after

LONGEST_WAIT = 60.0
"""The largest Retry-After, in seconds."""


class Admission:
    """Places for `rows` samples that run and `max_queue` that wait for a row.

    A request takes a place for each of its samples, those of all its prompts, and gives them back
    when it ends. Used on one event loop. `clock` is in seconds.
    """

    def __init__(
        self, rows: int, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.places = rows + max_queue
        self.taken = 0
        self._rows = rows
        self._clock = clock
        self._seconds = 0.0
        """That a sample takes, from its admission to its end: a moving mean."""

    @contextmanager
    def enter(self, samples: int = 1) -> Iterator[None]:
        """Hold places for the samples of a request.

        Raises ApiError: 400 if the server has fewer places, 429 if too few are free now.
        """
        if samples > self.places:
            raise ApiError(
                400,
                f"the request asks for {samples} samples (n for each prompt), and this server "
                f"takes {self.places} at one time; send several requests",
                param="n",
            )
        if self.taken + samples > self.places:
            raise ApiError(
                429,
                f"{self.taken} samples run or wait here and {samples} more would exceed the "
                f"{self.places} places (rows and max_queue); try again later",
                code="queue_full",
                headers=retry_after(self._seconds_until_free(samples)),
            )
        self.taken += samples
        began = self._clock()
        try:
            yield
        finally:
            self.taken -= samples
            self._seconds += 0.1 * (self._clock() - began - self._seconds)

    def _seconds_until_free(self, samples: int) -> float:
        """When so many places will be free: all rows together end `rows` samples in a mean time."""
        missing = self.taken + samples - self.places
        return min(LONGEST_WAIT, max(1.0, missing * self._seconds / self._rows))
