"""The single-process executor: one worker, in the engine's own process."""

from __future__ import annotations

from pydantic import BaseModel

from nanovllm_core.errors import EngineClosedError
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.worker.worker import Worker

_NOT_STARTED = "the executor has not started; create a new LLM"


class SingleProcessExecutor(Executor):
    """Holds one `Worker` and calls it directly."""

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        self._worker: Worker | None = None

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        self._worker = Worker(setup)
        return self._worker.start()

    def submit(self, plan: StepPlan) -> None:
        if self._worker is None:
            raise EngineClosedError(_NOT_STARTED)
        self._worker.submit(plan)

    def sample(self, masks: TokenMasks) -> None:
        if self._worker is None:
            raise EngineClosedError(_NOT_STARTED)
        self._worker.sample(masks)

    def collect(self) -> StepResult:
        if self._worker is None:
            raise EngineClosedError(_NOT_STARTED)
        return self._worker.collect()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
