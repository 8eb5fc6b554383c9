"""An executor around the core's own: it passes plans on and measures what comes back.

An executor that reaches workers elsewhere has the same methods. It sends `WorkerSetup`,
every plan and all masks, in order, to a `nanovllm_core.worker.Worker` there: all of it is data.
"""

from __future__ import annotations

import logging
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

from nanovllm_executor_my_plugin.plugin import MyPluginOptions

logger = logging.getLogger(__name__)


class MyPluginExecutor(Executor):
    """Runs plans in this process, in order, and keeps the time of each."""

    def __init__(self, options: MyPluginOptions) -> None:
        super().__init__(options)
        self._path = options.csv
        self._file: TextIO | None = None
        self._worker = SingleProcessExecutor(options)
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._steps = 0
        self._seconds = 0.0

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        """Called once. The file comes first: a wrong path fails before a model is loaded."""
        if self._path is not None:
            try:
                self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 - see close
            except OSError as error:
                raise ConfigError(
                    f"executor.options.csv: {self._path!r} cannot be written: {error}; give the "
                    "path of a file in a folder that exists"
                ) from error
            self._file.write("tokens,rows,seconds\n")
        return self._worker.start(setup)

    def submit(self, plan: StepPlan) -> None:
        """Called once per step; must not wait for the device."""
        self._in_flight.append((plan, perf_counter()))
        self._worker.submit(plan)

    def sample(self, masks: TokenMasks) -> None:
        """Called after `submit` where the plan `samples_later`; must not wait either."""
        self._worker.sample(masks)

    def collect(self) -> StepResult:
        """Called once per step, in the order of the plans; waits for the oldest."""
        result = self._worker.collect()
        plan, launched = self._in_flight.popleft()
        seconds = perf_counter() - launched
        self._steps += 1
        self._seconds += seconds
        if self._file is not None:
            self._file.write(f"{plan.num_tokens},{plan.num_sampled},{seconds:.6f}\n")
        return result

    def close(self) -> None:
        """Closing twice is fine."""
        self._worker.close()
        if self._steps:
            mean = 1000 * self._seconds / self._steps
            logger.info("%d steps, %.2f ms from launch to result", self._steps, mean)
        self._steps = 0
        if self._file is not None:
            self._file.close()
            self._file = None
