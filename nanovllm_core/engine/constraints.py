"""The constraints of samples: their states, and their masks, made within a bounded time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from nanovllm_core.errors import PluginFailedError
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
        self.num_taken = 0
        """Output ids that the constraints have taken in, or are taking in."""
        self._call = ""
        self.names = " and ".join(loaded.label for loaded, _ in asked)
        self.mask: NDArray[np.int32] | None = None
        """The ids allowed for the newest id, int32 [W]."""

    def next_mask(self, new_ids: Sequence[int]) -> NDArray[np.int32]:
        """Take in the output ids after the first `num_taken`, and fill the mask of the next one.

        Raises PluginFailedError where a constraint raises, or where no id is allowed.
        """
        self.num_taken += len(new_ids)
        allowed = np.full(mask_words(self._vocab_size), -1, np.int32)
        if self._vocab_size % 32:
            allowed[-1] = (1 << self._vocab_size % 32) - 1
        for use in self._uses:
            mask = np.zeros_like(allowed)
            try:
                self._advance(use, new_ids)
                self._call = f"{use.loaded.label}: fill"
                use.loaded.constraint.fill(use.state, mask)
            except BaseException as error:
                raise PluginFailedError(
                    f"{self._call} failed: {type(error).__name__}: {error}; only this request ends"
                ) from error
            allowed &= mask
        if not allowed.any():
            raise PluginFailedError(
                f"{self.names} allowed none of the {self._vocab_size} ids after "
                f"{self.num_taken} of the output; an answer that is complete must allow an "
                "end-of-sequence id"
            )
        return allowed

    def _advance(self, use: _Use, new_ids: Sequence[int]) -> None:
        constraint = use.loaded.constraint
        if not use.has_started:
            self._call = f"{use.loaded.label}: start"
            use.state = constraint.start(use.arguments, self._prompt_ids)
            use.has_started = True
        self._call = f"{use.loaded.label}: advance"
        for token_id in new_ids:
            constraint.advance(use.state, token_id)

    def stuck(self, seconds: float) -> PluginFailedError:
        """The error of a call that has not returned."""
        return PluginFailedError(
            f"{self._call} has not returned within {seconds:g} s, so this request ends; make it "
            "faster, or raise limits.constraint_seconds"
        )

    def refused(self, token_id: int) -> PluginFailedError | None:
        """The error of an id that the newest mask does not allow."""
        if self.mask is None or allows(self.mask, token_id):
            return None
        return PluginFailedError(
            f"id {token_id} was chosen, which {self.names} did not allow: min_tokens, logit_bias "
            "or a logits processor of the request forbids every id that was; change one of them"
        )


@dataclass(frozen=True, slots=True)
class Filling:
    """One mask to make: whose, and the output ids that it has not taken in."""

    sample: SampleConstraints
    new_ids: list[int]


Filled = NDArray[np.int32] | PluginFailedError


class MaskFiller:
    """Makes masks on threads of its own, and never waits longer than `seconds` for one of them.

    A call that does not return keeps its thread, which is left behind.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stuck: list[Thread] = []

    def fill(self, fillings: Sequence[Filling]) -> list[Filled]:
        """The mask of each, or the error that ends its request."""
        filled: list[Filled] = []
        while len(filled) < len(fillings):
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            rest = fillings[len(filled) :]
            if len(self._stuck) >= MAX_STUCK:
                return [*filled, *([self._refusal()] * len(rest))]
            batch = _Batch(rest, self._seconds)
            filled += batch.wait()
            if len(filled) < len(fillings):
                filled.append(fillings[len(filled)].sample.stuck(self._seconds))
                self._stuck.append(batch.thread)
        return filled

    def _refusal(self) -> PluginFailedError:
        return PluginFailedError(
            f"{len(self._stuck)} calls of constraints have not returned, and {MAX_STUCK} are the "
            "limit; repair the constraint, and make a new engine"
        )


class _Batch:
    """Masks made one after another on a thread of their own, until one takes too long."""

    def __init__(self, fillings: Sequence[Filling], seconds: float) -> None:
        self._fillings = fillings
        self._seconds = seconds
        self._filled: list[Filled] = []
        self._finished = Event()
        self._lock = Lock()
        self._is_left = False
        self._deadline = perf_counter() + seconds
        self.thread = Thread(target=self._run, name="nanovllm-constraints", daemon=True)
        self.thread.start()

    def wait(self) -> list[Filled]:
        """Those that were made; the one after them is stuck."""
        while not self._finished.wait(self._deadline - perf_counter()):
            with self._lock:
                if perf_counter() >= self._deadline and not self._finished.is_set():
                    self._is_left = True
                    break
        return self._filled

    def _run(self) -> None:
        for filling in self._fillings:
            result: Filled
            try:
                result = filling.sample.next_mask(filling.new_ids)
            except PluginFailedError as error:
                result = error
            with self._lock:
                if self._is_left:
                    return
                self._filled.append(result)
                self._deadline = perf_counter() + self._seconds
        self._finished.set()
