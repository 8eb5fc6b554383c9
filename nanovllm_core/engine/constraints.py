"""The constraints of samples: their states, and their masks, made within a bounded time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nanovllm_core.errors import InvalidSamplingError, NanoVLLMError, PluginFailedError
from nanovllm_core.interfaces.constraint import Constraint, ConstraintSpec, allows
from nanovllm_core.interfaces.plan import PADDED, mask_words

MAX_THREADS = 16
"""Of one engine that make masks, with those left behind in calls that do not return."""
PATIENCE = 0.1
"""Seconds between two looks at masks that are not ready, at most."""


@dataclass(frozen=True, slots=True)
class LoadedConstraint:
    """A constraint, its spec, and a label that names plugin and distribution."""

    label: str
    spec: ConstraintSpec
    constraint: Constraint


@dataclass(slots=True, eq=False)
class _Use:
    """One constraint of one sample; its state once it has started."""

    loaded: LoadedConstraint
    arguments: BaseModel
    state: object = None
    has_started: bool = False


class SampleConstraints:
    """The constraints of one sample, the ids they have taken in, and the newest mask."""

    def __init__(
        self,
        asked: Sequence[tuple[LoadedConstraint, BaseModel]],
        prompt_ids: NDArray[np.int32],
        vocab_size: int,
    ) -> None:
        self._uses = [_Use(loaded, arguments) for loaded, arguments in asked]
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._names = " and ".join(loaded.label for loaded, _ in asked)
        self.num_taken = 0
        """Output ids that the constraints have taken in, or are taking in."""
        self.mask: NDArray[np.int32] | None = None
        """The ids allowed for the newest id, int32 [W]."""

    def next_mask(self, new_ids: Sequence[int], begin: Callable[[str], None]) -> NDArray[np.int32]:
        """Take in the output ids after the first `num_taken`, and fill the mask of the next one.

        `begin` gets the name of each call of a constraint before it is made. Raises
        PluginFailedError where a constraint raises, InvalidSamplingError where no id is allowed,
        and what `begin` raises.
        """
        self.num_taken += len(new_ids)
        allowed = np.full(mask_words(self._vocab_size), -1, np.int32)
        if self._vocab_size % 32:
            allowed[-1] = (1 << self._vocab_size % 32) - 1

        def call(use: _Use, method: str, *arguments: Any) -> Any:
            name = f"{use.loaded.label}: {method}"
            begin(name)
            try:
                return getattr(use.loaded.constraint, method)(*arguments)
            except BaseException as error:
                raise PluginFailedError(
                    f"{name} failed: {_text(error)}; only this request ends"
                ) from error

        for use in self._uses:
            mask = np.zeros_like(allowed)
            if not use.has_started:
                use.state = call(use, "start", use.arguments, self._prompt_ids)
                use.has_started = True
            for token_id in new_ids:
                call(use, "advance", use.state, token_id)
            call(use, "fill", use.state, mask)
            allowed &= mask
        if not allowed.any():
            raise InvalidSamplingError(
                f"constraints: {self._names} allowed none of the {self._vocab_size} ids after "
                f"{self.num_taken} of the output; ask for what these ids can spell. A constraint "
                "must allow an end-of-sequence id where its answer is complete"
            )
        return allowed

    def refused(self, token_id: int) -> InvalidSamplingError | None:
        """The error of an id that the newest mask does not allow, or of -1: none was left."""
        if token_id != PADDED and (self.mask is None or allows(self.mask, token_id)):
            return None
        return InvalidSamplingError(
            "constraints: min_tokens or a logits processor of the request forbids every id that "
            f"{self._names} allowed after {self.num_taken} of the output; change one of them"
        )


def _text(error: BaseException) -> str:
    """The type and the text of an error whose `__str__` may raise."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException:
        return name


Filled = NDArray[np.int32] | NanoVLLMError


@dataclass(slots=True, eq=False)
class Filling:
    """One mask to make: whose, and the output ids that it has not taken in."""

    sample: SampleConstraints
    new_ids: list[int]
    request: str
    """All samples of one request have the same."""
    call: str = "the thread of the constraints"
    """The newest one that was made for it."""
    num_looks: int = 0
    """At which it was being made."""
    filled: Filled | None = None
    """The mask, or the error that ends its sample."""

    def begin(self, call: str) -> None:
        """Called before each call of a constraint."""
        if self.filled is not None:
            raise _LeftBehindError
        self.call = call


class MaskFiller:
    """Makes the masks of a step on other threads, each of them within `seconds`.

    One thread makes them, one after another, and is kept from step to step. While a mask is slow,
    another thread goes on with those of other requests; those of the same request wait for it. A
    thread whose mask is late is left behind: it ends when the call that it is in returns.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = min(PATIENCE, seconds / 16)
        self._max_looks = math.ceil(seconds / self._pause)
        self._threads: list[_FillingThread] = []
        self._stuck: list[_FillingThread] = []
        weakref.finalize(self, _end, self._threads)

    def fill(self, fillings: Sequence[Filling]) -> list[Filled]:
        """The mask of each, or the error that ends its sample."""
        if not fillings:
            return []
        batch = _Batch(fillings)
        self._add_thread(batch)
        while not batch.is_finished.wait(self._pause):
            self._look(batch)
        return [one.filled for one in fillings if one.filled is not None]

    def _look(self, batch: _Batch) -> None:
        """Leave threads behind whose masks are late; add one where all that work are slow."""
        working = [(one, its) for one in self._threads if (its := one.filling) is not None]
        for thread, filling in working:
            filling.num_looks += 1  # No clock: a call that stops all threads stops this one too.
            if filling.num_looks > self._max_looks and batch.end(filling, self._late(filling)):
                self._threads.remove(thread)
                self._stuck.append(thread)
                thread.leave()
                batch.end_waiting(partial(self._late, filling), filling.request)
        slow = [filling for _, filling in working if filling.num_looks > 1]
        batch.slow = {filling.request for filling in slow if filling.filled is None}
        if batch.waiting and len(slow) == len(working):
            self._add_thread(batch)

    def _add_thread(self, batch: _Batch) -> None:
        """Let another thread make masks of the batch; refuse them where none can any more."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        idle = next((one for one in self._threads if one.filling is None), None)
        if idle is None and len(self._threads) + len(self._stuck) < MAX_THREADS:
            idle = _FillingThread()
            self._threads.append(idle)
        if idle is not None:
            idle.batches.put(batch)
        elif not self._threads:
            batch.end_waiting(self._refusal)

    def _late(self, filling: Filling) -> PluginFailedError:
        return PluginFailedError(
            f"{filling.call} has not returned, and a mask must be made within {self._seconds:g} s, "
            "so the request that waits for it ends; make it faster, or raise "
            "limits.constraint_seconds"
        )

    def _refusal(self) -> PluginFailedError:
        return PluginFailedError(
            f"{len(self._stuck)} calls of constraints have not returned, and {MAX_THREADS} are the "
            "limit; repair the constraint, and make a new engine"
        )


class _LeftBehindError(Exception):
    """Nobody waits for this mask any more."""


class _Batch:
    """The masks of one step, which several threads may make."""

    def __init__(self, fillings: Sequence[Filling]) -> None:
        self.waiting = list(fillings)
        self.slow: set[str] = set()
        """Requests of which a mask was slow at the last look, and has not come since."""
        self.is_finished = Event()
        self._num_left = len(fillings)
        self._lock = Lock()

    def take(self) -> Filling | None:
        """The next mask to make; None where no other waits, or only of requests that are slow."""
        with self._lock:
            for place, filling in enumerate(self.waiting):
                if filling.request not in self.slow:
                    return self.waiting.pop(place)
        return None

    def end(self, filling: Filling, filled: Filled) -> bool:
        """Keep the mask, or the error of its sample; False if it had one before."""
        with self._lock:
            if filling.filled is not None:
                return False
            filling.filled = filled
            self.slow.discard(filling.request)
            self._num_left -= 1
            if not self._num_left:
                self.is_finished.set()
            return True

    def end_waiting(self, error: Callable[[], NanoVLLMError], request: str | None = None) -> None:
        """End the samples whose masks wait, of one request or all, each with its own error."""
        with self._lock:
            ended = [one for one in self.waiting if request in (None, one.request)]
            self.waiting = [one for one in self.waiting if request not in (None, one.request)]
        for filling in ended:
            self.end(filling, error())


class _FillingThread(Thread):
    """Makes masks of batches, one after another, until it is told to leave."""

    def __init__(self) -> None:
        super().__init__(name="nanovllm-constraints", daemon=True)
        self.batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self.filling: Filling | None = None
        """The mask that it makes."""
        self.start()

    def run(self) -> None:
        for batch in iter(self.batches.get, None):
            while (filling := batch.take()) is not None:
                self.filling = filling
                try:
                    filled: Filled = filling.sample.next_mask(filling.new_ids, filling.begin)
                except NanoVLLMError as error:
                    filled = error
                except _LeftBehindError:
                    return
                self.filling = None
                if not batch.end(filling, filled):
                    return

    def leave(self) -> None:
        """End once the batches before are done or left."""
        self.batches.put(None)


def _end(threads: list[_FillingThread]) -> None:
    for thread in threads:
        thread.leave()
