"""What the host spends on a steady decode step: time and Python calls, the device left out.

    python benchmarks/host_step.py

The engine and the worker are the real ones, on the CPU; only the captured graph is an impostor that
writes its words at once. "steady" is the step of unchanged rows, within a block. With "blocks of
16" one row in sixteen crosses a block at every step, with a block to append and another to publish.
Where "a row leaves", one request is aborted before every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from types import FrameType
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.engine import Engine
from nanovllm_core.worker.graphs import StepGraphs, StepKey
from nanovllm_core.worker.results import ResultRing

MAX_ROWS = 256
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class InstantGraphs:
    """Stands for captured decode steps: every row's next token is 7, and is there at once."""

    def __init__(self, results: ResultRing) -> None:
        self._words = results.words.numpy()
        self._num_finished = results.num_finished.numpy()
        self.replays = 0

    def replay(self, key: StepKey) -> None:
        self.replays += 1
        step = int(self._num_finished[0])
        self._words[step % len(self._words), : key.num_rows] = (step + 1) << 32 | (7 + 1) << 1
        self._num_finished[0] = step + 1

    def clear(self) -> None: ...


@contextmanager
def decoding_engine(
    batch: int,
    block_size: int = 256,
    stagger: bool = False,
    prefix_caching: bool = True,
    **asked: Any,
) -> Iterator[Engine]:
    """An engine whose `batch` requests all decode; `stagger` spreads them over their blocks.

    Each asks for `asked`, as `SamplingParams` name it.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        limits = {"max_num_seqs": MAX_ROWS, "max_model_len": 4096}
        cache = {"block_size": block_size, "prefix_caching": prefix_caching}
        cache["num_blocks"] = MAX_ROWS * 4096 // block_size
        with LLM(
            folder, load_format="dummy", device="cpu", dtype="float32", limits=limits, cache=cache
        ) as llm:
            engine = llm.engine
            runner = cast(Any, llm.engine._executor)._worker._runner
            runner._graphs = cast(StepGraphs, InstantGraphs(runner.sampling.results))
            for row in range(batch):
                length = 8 + (row % block_size if stagger else 0)
                add_request(engine, str(row), length, **asked)
            for _ in range(8):
                engine.step()
            yield engine


def add_request(engine: Engine, request_id: str, length: int, **asked: Any) -> None:
    """A request that goes on until it is aborted."""
    params = SamplingParams(ignore_eos=True, max_tokens=None, **asked)
    engine.add_request(request_id, [1] * length, params)


def step_microseconds(step: Callable[[], object], steps: int) -> list[float]:
    """The time of each of some steps, in microseconds."""
    times = []
    for _ in range(steps):
        started = perf_counter()
        step()
        times.append((perf_counter() - started) * 1e6)
    return times


def calls_per_step(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Python functions and C functions called per step."""
    counts = {"call": 0, "c_call": 0}

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        if event in counts:
            counts[event] += 1

    gc.collect()
    gc.disable()  # a collection runs callbacks of libraries
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts["call"] / steps, (counts["c_call"] - 1) / steps


def step_without_one(engine: Engine) -> None:
    """A step before which the oldest request is aborted."""
    engine.abort(next(iter(engine._samples)))
    engine.step()


def measure(table: Table, label: tuple[str, str], step: Callable[[], object], steps: int) -> None:
    calls, c_calls = calls_per_step(step, steps)
    times = step_microseconds(step, steps)
    numbers = (f"{median(times):.1f}", f"{mean(times):.1f}", f"{calls:.0f}", f"{c_calls:.0f}")
    table.add_row(*label, *numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=96)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    table = Table(title="host time of a decode step")
    for column in ("rows", "step", "median µs", "mean µs", "calls", "C calls"):
        table.add_column(column, justify="right")
    for batch in (1, MAX_ROWS):
        for name, block_size, stagger in (("steady", 256, False), ("blocks of 16", 16, True)):
            with decoding_engine(batch, block_size, stagger) as engine:
                measure(table, (str(batch), name), engine.step, steps)
    with decoding_engine(MAX_ROWS) as engine:
        measure(table, (str(MAX_ROWS), "a row leaves"), partial(step_without_one, engine), steps)
    Console().print(table)


if __name__ == "__main__":
    main()
