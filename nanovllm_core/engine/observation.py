"""The engine's counters, and what observers hear of each step and each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from time import perf_counter

from nanovllm_core.engine.planner import PlannedStep
from nanovllm_core.engine.request import Request
from nanovllm_core.interfaces.observer import RequestRecord, StepObserver, StepRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine started, and how things stand.

    `finished` requests ended, aborted ones among them; each sample counts.
    `host_seconds` is the time spent in `step()` outside waiting for results: planning, submitting
    and taking results in. `steady_seconds` is its part in the `steady_steps` calls that submitted a
    decode step of the very rows of the step before. `ended` is 1 where an error ended the engine.

    Where several engines share the requests, these are their sums, and `engines` those of each.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks: int = 0
    host_seconds: float = 0.0
    steady_steps: int = 0
    steady_seconds: float = 0.0
    ended: int = 0
    engines: tuple[EngineStats, ...] = ()


class Observation:
    """The observers of one engine, by a label that names their distribution.

    One that raises is reported and closed, and hears no more; the engine and the others go on.
    """

    def __init__(self, observers: Mapping[str, StepObserver]) -> None:
        self._observers = dict(observers)
        self._step = 0
        self._before = EngineStats()
        """As things stood when the last step was collected."""
        self._collected: float | None = None
        """When the last step was collected; None where nothing was in flight behind it."""

    def observe(
        self, stats: EngineStats, taken: PlannedStep, num_in_flight: int, began: float
    ) -> None:
        """A step was taken in, in a call of the engine that began at `began`."""
        now = perf_counter()
        before, self._before = self._before, stats
        self._step += 1
        record = StepRecord(
            step=self._step,
            seconds=now - (began if self._collected is None else self._collected),
            num_decode_rows=taken.plan.num_decode,
            num_prefill_tokens=sum(chunk.length for chunk in taken.plan.prefill),
            num_output_tokens=stats.output_tokens - before.output_tokens,
            num_finished=stats.finished - before.finished,
            num_preempted=stats.preemptions - before.preemptions,
            num_running=stats.running,
            num_waiting=stats.waiting,
            num_in_flight=num_in_flight,
            num_free_blocks=stats.free_blocks,
            num_blocks=stats.blocks,
        )
        # A step in flight without requests is collected with the next ones, after any pause.
        is_busy = num_in_flight and stats.running + stats.waiting
        self._collected = now if is_busy else None
        self._tell("on_step", record)

    def observe_request(self, request: Request) -> None:
        """A request is over; its record is made where an observer wants it."""
        unread = StepObserver.on_request_finished
        wanted = any(type(o).on_request_finished is not unread for o in self._observers.values())
        if request.finish_reason is None or not wanted:
            return
        facts = {one.name: getattr(request, one.name) for one in fields(RequestRecord)}
        record = RequestRecord(**{**facts, "request_id": request.group_id})
        self._tell("on_request_finished", record)

    def _tell(self, method: str, record: StepRecord | RequestRecord) -> None:
        for label, observer in tuple(self._observers.items()):
            if not _survives(label, partial(getattr(observer, method), record)):
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
