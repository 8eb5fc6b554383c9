"""The constraints of samples: their states, and their masks, made within a bounded time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nanovllm_core.errors import InvalidSamplingError, NanoVLLMError, PluginFailedError
from nanovllm_core.interfaces.constraint import Constraint, ConstraintSpec, allows
from nanovllm_core.interfaces.plan import mask_words

MAX_STUCK = 16
"""Threads that may be left behind in calls that do not return; beyond them no mask is made."""


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
        """The error of an id that the newest mask does not allow.

        The device chooses one where no id that the mask allows is left.
        """
        if self.mask is None or allows(self.mask, token_id):
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


@dataclass(frozen=True, slots=True)
class Filling:
    """One mask to make: whose, and the output ids that it has not taken in."""

    sample: SampleConstraints
    new_ids: list[int]


Filled = NDArray[np.int32] | NanoVLLMError


class MaskFiller:
    """Makes the masks of a step on a thread of its own, within `seconds` for all of them.

    The thread is kept from step to step. One that is late is left behind: it ends when the call
    that it is in returns, and the next step gets another.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: _FillingThread | None = None
        self._stuck: list[_FillingThread] = []

    def fill(self, fillings: Sequence[Filling]) -> list[Filled]:
        """The mask of each, or the error that ends its request."""
        if not fillings:
            return []
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MAX_STUCK:
            return [self._refusal() for _ in fillings]
        if self._thread is None:
            self._thread = _FillingThread()
            weakref.finalize(self, self._thread.leave)
        batch = _Batch(fillings)
        self._thread.batches.put(batch)
        if not batch.is_finished.wait(self._seconds):
            batch.is_left = True
            self._thread.leave()
            self._stuck.append(self._thread)
            self._thread = None
        filled = batch.filled.copy()  # A thread that was left behind may still add one.
        return filled + [self._late(batch) for _ in fillings[len(filled) :]]

    def _late(self, batch: _Batch) -> PluginFailedError:
        return PluginFailedError(
            f"{batch.call} has not returned, and the masks of a step must be made within "
            f"{self._seconds:g} s, so the requests that wait for theirs end; make it faster, or "
            "raise limits.constraint_seconds"
        )

    def _refusal(self) -> PluginFailedError:
        return PluginFailedError(
            f"{len(self._stuck)} calls of constraints have not returned, and {MAX_STUCK} are the "
            "limit; repair the constraint, and make a new engine"
        )


class _LeftBehindError(Exception):
    """Nobody waits for this batch any more."""


class _Batch:
    """The masks of one step, and the call that is being made for them."""

    def __init__(self, fillings: Sequence[Filling]) -> None:
        self._fillings = fillings
        self.filled: list[Filled] = []
        self.is_finished = Event()
        self.is_left = False
        self.call = "the thread of the constraints"

    def run(self) -> None:
        for filling in self._fillings:
            try:
                filled: Filled = filling.sample.next_mask(filling.new_ids, self._begin)
            except NanoVLLMError as error:
                filled = error
            except _LeftBehindError:
                return
            self.filled.append(filled)
        self.is_finished.set()

    def _begin(self, call: str) -> None:
        if self.is_left:
            raise _LeftBehindError
        self.call = call


class _FillingThread(Thread):
    """Makes the masks of batches, one after another, until it is told to leave."""

    def __init__(self) -> None:
        super().__init__(name="nanovllm-constraints", daemon=True)
        self.batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        for batch in iter(self.batches.get, None):
            batch.run()

    def leave(self) -> None:
        """End once the batches before are done or left."""
        self.batches.put(None)
