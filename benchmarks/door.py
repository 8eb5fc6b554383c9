"""What the hand-over of tokens costs, without a GPU: an engine stepped by hand against `AsyncLLM`.

    python benchmarks/door.py [--step-ms 1.0] [--rate 32] [--requests 64] [--turns 3]

The engine, its thread and the event loop are the real ones. The device is a clock: a step's result
is there after a given time, and the executor waits for it as it waits for a GPU. Requests arrive as
a Poisson process; a request's clock starts at its arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from nanovllm_bench.latency import Trace, arrival_times, percentiles, trace_requests
from nanovllm_bench.workloads import Workload, fixed_workload
from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import PADDED, StepPlan, StepResult, TokenMasks, WorkerInfo
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.worker.polling import StepWait

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LAUNCH_BYTES = bytes(16 * 1024)
"""Hashing them takes about as long as launching a graph, and like it holds no interpreter lock."""


class TimedExecutor(Executor):
    """Steps that take their time, one after the other, as on a device. Every next id is 7."""

    def __init__(self, num_rows: int, step_seconds: float, token_seconds: float) -> None:
        super().__init__(NoOptions())
        self._step_seconds, self._token_seconds = step_seconds, token_seconds
        self._left = np.zeros(num_rows, np.int64)
        self._decode_rows = np.zeros(0, np.int32)
        self._in_flight: deque[tuple[float, float, StepResult]] = deque()
        self._idle_at = 0.0
        self._wait = StepWait()
        self.late: list[float] = []
        """By step, in seconds: from the end of the step to its result's being taken."""

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        raise NotImplementedError("it takes the place of a started one")

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._left[admission.row] = admission.max_length - len(admission.token_ids)
        if plan.decode_rows is not None:
            self._decode_rows = plan.decode_rows
        prompts = [chunk.row for chunk in plan.prefill if chunk.samples]
        rows = np.concatenate([self._decode_rows, prompts]).astype(np.intp)
        is_padded = self._left[rows] <= 0
        self._left[rows] -= 1
        result = StepResult(np.where(is_padded, PADDED, 7).astype(np.int32), self._left[rows] == 0)
        hashlib.sha256(LAUNCH_BYTES)
        now = perf_counter()
        seconds = self._step_seconds + self._token_seconds * (plan.num_tokens - plan.num_decode)
        self._idle_at = max(now, self._idle_at) + seconds
        self._in_flight.append((now, self._idle_at, result))

    def sample(self, masks: TokenMasks) -> None:
        raise NotImplementedError("no request here is constrained")

    def collect(self) -> StepResult:
        launched, done_at, result = self._in_flight[0]
        self._wait(None, launched, lambda: perf_counter() >= done_at, lambda: None)
        self.late.append(perf_counter() - done_at)
        del self._in_flight[0]
        return result


@contextmanager
def timed_engine(step_ms: float, prompt_ms: float, input_len: int) -> Iterator[AsyncLLM]:
    """A door whose engine runs on a `TimedExecutor`; a prompt's step takes `prompt_ms` more."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        limits = {"max_num_seqs": 256, "max_model_len": 1024}
        llm = AsyncLLM(
            folder, load_format="dummy", device="cpu", dtype="float32", limits=limits,
            cache={"num_blocks": 65536},
        )  # fmt: skip
        executor = TimedExecutor(256, step_ms * 1e-3, prompt_ms * 1e-3 / input_len)
        started, llm.engine._executor = llm.engine._executor, executor
        try:
            yield llm
        finally:
            llm.engine._executor = started
            llm.close()


def step_by_hand(llm: AsyncLLM, workload: Workload, arrivals: list[float]) -> Trace:
    """Take the engine's steps on this thread; requests are added between two of them."""
    engine, sent = llm.engine, 0
    streams: dict[str, tuple[int, Any]] = {}
    seen: list[list[float]] = [[] for _ in arrivals]
    started = perf_counter()
    while sent < len(arrivals) or engine.has_unfinished():
        while sent < len(arrivals) and arrivals[sent] <= perf_counter() - started:
            params = SamplingParams(max_tokens=workload.output_lens[sent], ignore_eos=True)
            request = llm._new_request(workload.prompts[sent], params, None, stream=True)
            streams[request.request_id] = sent, llm._streams(request)[0]
            engine.add_request(
                request.request_id, request.prompt_token_ids, request.params, stream=True
            )
            sent += 1
        if not engine.has_unfinished():
            time.sleep(max(0.0, arrivals[sent] - (perf_counter() - started)))
            continue
        for delta in engine.step():
            index, stream = streams[delta.request_id]
            output = stream.push(delta)
            seen[index] += [perf_counter() - started] * len(output.new_token_ids)
    return Trace(arrivals, seen)


def through_the_door(llm: AsyncLLM, workload: Workload, arrivals: list[float]) -> Trace:
    return asyncio.run(trace_requests(llm, workload, arrivals, 0.6))


WAYS: dict[str, Callable[[AsyncLLM, Workload, list[float]], Trace]] = {
    "by hand": step_by_hand,
    "AsyncLLM": through_the_door,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--prompt-ms", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=32.0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    traces: dict[str, list[Trace]] = {name: [] for name in WAYS}
    late: dict[str, list[float]] = {name: [] for name in WAYS}
    workload = fixed_workload(asked.requests, asked.input_len, asked.output_len)
    with timed_engine(asked.step_ms, asked.prompt_ms, asked.input_len) as llm:
        workload = workload.within(llm.info.vocab_size)
        executor: Any = llm.engine._executor
        for turn in range(asked.turns):
            times = arrival_times(asked.requests, asked.rate, "poisson", seed=turn)
            for name, run in WAYS.items():
                llm.reset_prefix_cache()
                executor.late.clear()
                traces[name].append(run(llm, workload, times))
                late[name] += executor.late
    table = Table(
        title=f"{asked.rate:g} requests/s, steps of {asked.step_ms:g} ms, {asked.turns} turns"
    )
    for column in ("way", "what", "p50 ms", "p90 ms", "p99 ms", "mean ms"):
        table.add_column(column, justify="left" if column in ("way", "what") else "right")
    for name in WAYS:
        values = {
            "first token": [ms for trace in traces[name] for ms in trace.first_token_ms()],
            "between tokens": [ms for trace in traces[name] for ms in trace.inter_token_ms()],
            "result late": [1e3 * seconds for seconds in late[name]],
        }
        for what, times in values.items():
            numbers = (*percentiles(times).values(), round(mean(times), 3))
            table.add_row(name, what, *(f"{number:.3f}" for number in numbers))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
