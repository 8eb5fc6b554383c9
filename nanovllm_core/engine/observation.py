"""Tells the observers what each step did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import perf_counter

from nanovllm_core.engine.planner import PlannedStep
from nanovllm_core.engine.stats import EngineStats
from nanovllm_core.interfaces.observer import StepObserver, StepRecord

logger = logging.getLogger(__name__)


class Observation:
    """The observers of one engine, by a label that names their distribution.

    One that raises is reported and closed, and hears no more; the engine and the others go on.
    """

    def __init__(self, observers: Mapping[str, StepObserver]) -> None:
        self._observers = dict(observers)
        self._step = 0
        self._num_output_tokens = self._num_finished = self._num_preempted = 0
        self._collected: float | None = None
        """When the last step was collected; None where nothing was in flight behind it."""

    def observe(
        self, stats: EngineStats, taken: PlannedStep, num_in_flight: int, began: float
    ) -> None:
        """A step was taken in, in a call of the engine that began at `began`."""
        now = perf_counter()
        self._step += 1
        record = StepRecord(
            step=self._step,
            seconds=now - (began if self._collected is None else self._collected),
            num_decode_rows=len(taken.plan.decode_rows),
            num_prefill_tokens=sum(chunk.length for chunk in taken.plan.prefill),
            num_output_tokens=stats.output_tokens - self._num_output_tokens,
            num_finished=stats.finished - self._num_finished,
            num_preempted=stats.preemptions - self._num_preempted,
            num_running=stats.running,
            num_waiting=stats.waiting,
            num_in_flight=num_in_flight,
            num_free_blocks=stats.free_blocks,
            num_blocks=stats.blocks,
        )
        self._num_output_tokens = stats.output_tokens
        self._num_finished, self._num_preempted = stats.finished, stats.preemptions
        self._collected = now if num_in_flight else None
        for label, observer in tuple(self._observers.items()):
            if not _survives(label, lambda observer=observer: observer.on_step(record)):  # type: ignore[misc]
                self._drop(label)

    def _drop(self, label: str) -> None:
        close_observers({label: self._observers.pop(label)})

    def close(self) -> None:
        """The last call: every observer that is left is closed, whatever the others raise."""
        observers, self._observers = self._observers, {}
        close_observers(observers)


def close_observers(observers: Mapping[str, StepObserver]) -> None:
    """Close each, by its label; what one raises goes to the log, an exit waits for the others."""
    with ExitStack() as closing:
        for label, observer in reversed(tuple(observers.items())):
            closing.callback(_survives, label, observer.close)


def _survives(label: str, call: Callable[[], None]) -> bool:
    """False, and a line in the log, where the call raised."""
    try:
        call()
    except Exception:
        logger.exception("%s raised; it is closed and hears no more of this engine", label)
        return False
    return True
