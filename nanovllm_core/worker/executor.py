"""The single-process executor: one worker, in the engine's own process."""

from __future__ import annotations

from pydantic import BaseModel

from nanovllm_core.errors import EngineClosedError
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.worker.worker import Worker


class SingleProcessExecutor(Executor):
    """Holds one `Worker` and calls it directly."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self._worker: Worker | None = None

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        self._worker = Worker(setup)
        return self._worker.start()

    @property
    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineClosedError("the executor has not started; create a new LLM")
        return self._worker

    def submit(self, plan: StepPlan) -> None:
        self._started.submit(plan)

    def sample(self, masks: TokenMasks) -> None:
        self._started.sample(masks)

    def collect(self) -> StepResult:
        return self._started.collect()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
