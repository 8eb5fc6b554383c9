"""What the host spends on a steady decode step: time and Python calls, against a null executor.

    python benchmarks/host_step.py

Plans, submits to a worker that does nothing, and takes the result in, with every row decoding. Page
size 256 shows the steady step, page size 16 the same with one row in sixteen crossing a page.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from statistics import median
from time import perf_counter
from types import FrameType

import numpy as np
from rich.console import Console
from rich.table import Table

from nanovllm_core.engine import Engine, EngineLimits, FcfsPolicy, TokenBudgetScheduler
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import StepPlan, StepResult, WorkerInfo
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.sampling_params import SamplingParams

MAX_MODEL_LEN = 4096
PROMPT_LEN = 200


class NullExecutor(Executor):
    """Answers every step with the same tokens; no row ever ends."""

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self._sizes: deque[int] = deque()
        self._results: dict[int, StepResult] = {}

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        raise NotImplementedError("nothing to start")

    def submit(self, plan: StepPlan) -> None:
        self._sizes.append(len(plan.sampled_rows))

    def collect(self) -> StepResult:
        size = self._sizes.popleft()
        if size not in self._results:
            self._results[size] = StepResult(np.full(size, 7, np.int32), np.zeros(size, np.bool_))
        return self._results[size]

    def close(self) -> None: ...


def decoding_engine(batch: int, block_size: int, prefix_caching: bool) -> Engine:
    """An engine whose `batch` requests all decode."""
    engine = Engine(
        NullExecutor(),
        TokenBudgetScheduler(FcfsPolicy()),
        EngineLimits(
            max_num_seqs=256,
            max_num_batched_tokens=16384,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=256 * MAX_MODEL_LEN // block_size,
            block_size=block_size,
            vocab_size=1000,
        ),
        prefix_caching=prefix_caching,
    )
    params = SamplingParams(ignore_eos=True, max_tokens=None)
    for i in range(batch):
        engine.add_request(str(i), [i % 1000 + 0] * (PROMPT_LEN + i % 256), params)
    while engine.stats.waiting:
        engine.step()
    for _ in range(4):
        engine.step()
    return engine


def step_microseconds(engine: Engine, steps: int) -> list[float]:
    """The time of each of some steps, in microseconds."""
    times = []
    for _ in range(steps):
        started = perf_counter()
        engine.step()
        times.append((perf_counter() - started) * 1e6)
    return times


def calls_per_step(engine: Engine, steps: int) -> tuple[float, float]:
    """Python functions and C functions called per step."""
    counts = {"call": 0, "c_call": 0}

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
    return counts["call"] / steps, counts["c_call"] / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    table = Table(title="host time of a decode step, null executor")
    for column in ("batch", "page", "prefix cache", "median µs", "mean µs", "calls", "C calls"):
        table.add_column(column, justify="right")
    for batch in (1, 256):
        for block_size in (256, 16):
            for prefix_caching in (False, True):
                engine = decoding_engine(batch, block_size, prefix_caching)
                times = step_microseconds(engine, args.steps)
                calls, c_calls = calls_per_step(engine, 500)
                table.add_row(
                    str(batch),
                    str(block_size),
                    "on" if prefix_caching else "off",
                    f"{median(times):.1f}",
                    f"{sum(times) / len(times):.1f}",
                    f"{calls:.0f}",
                    f"{c_calls:.0f}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
