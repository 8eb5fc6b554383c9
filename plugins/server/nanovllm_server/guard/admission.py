"""The bounded queue: how many samples may run and wait at one time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import retry_after
from nanovllm_server.guard.ledger import QUEUE, Ledger

LONGEST_WAIT = 60.0
"""The largest Retry-After, in seconds."""


class Admission:
    """Places for `rows` samples that run and `max_queue` that wait for a row.

    A request takes a place for each of its samples, those of all its prompts, and gives them back
    when it ends. The fronts of one `ledger` share the places. Used on one event loop. `clock` is in
    seconds.
    """

    def __init__(
        self,
        rows: int,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.places = rows + max_queue
        self._ledger = Ledger.create() if ledger is None else ledger
        self._rows = rows
        self._clock = clock
        self._seconds = 0.0
        """That a sample takes, from its admission to its end: a moving mean."""

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._ledger.total(QUEUE)

    def check_size(self, samples: int) -> None:
        """Raises ApiError (400) for a request of more samples than the server has places."""
        if samples > self.places:
            raise ApiError(
                400,
                f"the request asks for {samples} samples (n for each prompt), and this server "
                f"takes {self.places} at one time; send several requests",
                param="n",
            )

    @contextmanager
    def enter(self, samples: int = 1) -> Iterator[None]:
        """Hold places for the samples of a request.

        Raises ApiError: 400 if the server has fewer places, 429 if too few are free now.
        """
        self.check_size(samples)
        with self._ledger.lock():
            taken = self.taken
            if taken + samples > self.places:
                raise ApiError(
                    429,
                    f"{taken} samples run or wait here and {samples} more would exceed the "
                    f"{self.places} places (rows and max_queue); try again later",
                    code="queue_full",
                    headers=retry_after(self._seconds_until_free(taken + samples)),
                )
            self._ledger.add(QUEUE, samples)
        began = self._clock()
        try:
            yield
        finally:
            self._ledger.add(QUEUE, -samples)
            self._seconds += 0.1 * (self._clock() - began - self._seconds)

    def _seconds_until_free(self, wanted: int) -> float:
        """When so many places would do: all rows together end `rows` samples in a mean time."""
        missing = wanted - self.places
        return min(LONGEST_WAIT, max(1.0, missing * self._seconds / self._rows))
