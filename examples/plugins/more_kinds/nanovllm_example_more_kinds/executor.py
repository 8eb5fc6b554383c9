"""The core's executor, and a file with what each step was and how long it took."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TextIO

from nanovllm_core.api import (
    ConfigError,
    Executor,
    StepPlan,
    StepResult,
    TokenMasks,
    WorkerInfo,
    WorkerSetup,
)
from nanovllm_core.worker import SingleProcessExecutor
from nanovllm_example_more_kinds.command import Step
from nanovllm_example_more_kinds.plugin import TimedOptions


class TimedExecutor(Executor):
    """Hands everything on; see `nanovllm_core.api.Executor` for the contract.

    Steps overlap: one is submitted while others run. A step's time begins when it is submitted or
    when the one before is collected, whichever is later, so the times of a busy engine add up to
    the time that has passed.
    """

    def __init__(self, options: TimedOptions) -> None:
        super().__init__(options)
        self._path = options.path
        self._worker = SingleProcessExecutor(options)
        self._file: TextIO | None = None
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        """Plan and time of submission in seconds, the oldest first."""
        self._collected = 0.0

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        try:
            # Line by line, so that a reader never sees half a step.
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"the file of steps {self._path} cannot be opened ({error}); give the executor "
                "timed a path in a folder that exists and can be written to"
            ) from error
        return self._worker.start(setup)

    def submit(self, plan: StepPlan) -> None:
        submitted = perf_counter()  # on a CPU the step is computed in the call
        self._worker.submit(plan)
        self._in_flight.append((plan, submitted))

    def sample(self, masks: TokenMasks) -> None:
        self._worker.sample(masks)

    def collect(self) -> StepResult:
        result = self._worker.collect()
        # Only now: where Ctrl-C leaves the line above, the step is still in flight.
        plan, submitted = self._in_flight.popleft()
        now = perf_counter()
        self._write(plan, now - max(submitted, self._collected))
        self._collected = now
        return result

    def close(self) -> None:
        self._in_flight.clear()
        try:
            self._worker.close()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, plan: StepPlan, seconds: float) -> None:
        prefill = plan.num_tokens - plan.num_decode
        step = Step(prefill=prefill, decode=plan.num_decode, seconds=seconds)
        if self._file is not None:
            self._file.write(step.model_dump_json() + "\n")
