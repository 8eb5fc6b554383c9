"""What the way between a door and an engine's process costs, without a GPU.

    python benchmarks/processes.py [--streams 1 64 256] [--tokens 256] [--step-ms 0.0] [--turns 3]

First the messages alone: µs of this process's time to encode and to decode the deltas of a step.
Then whole streams through `AsyncLLM`, with the engine on a thread and in a process: output tokens
per second, and the time that the door's process spends for each. The engine and the door are the
real ones. The device is a clock: a step's result is there after a given time, 0 for at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from door import MODEL, TimedExecutor
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_core.api import ExecutorSpec, WorkerInfo, WorkerSetup, hookimpl
from nanovllm_core.frontend import OutputDelta
from nanovllm_engine_processes import wire

METADATA = "Metadata-Version: 2.1\nName: clock-executor\nVersion: 1\n"


class ClockOptions(BaseModel):
    """Options of `executor: {name: clock}`."""

    model_config = {"extra": "forbid"}
    step_ms: float = 0.0


class ClockExecutor(TimedExecutor):
    """A device that only takes time; it needs no model."""

    def __init__(self, options: ClockOptions) -> None:
        super().__init__(256, options.step_ms * 1e-3, 0.0)

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        return WorkerInfo(
            num_blocks=65536,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            vocab_size=int(MODEL["vocab_size"]),
            attention="none",
            device="clock",
        )


@hookimpl
def nanovllm_executors() -> Sequence[ExecutorSpec]:
    """The clock. Installed, for as long as this program runs, by metadata in a folder."""
    return [
        ExecutorSpec(name="clock", impl="processes:ClockExecutor", contract=4, options=ClockOptions)
    ]


def write_clock(folder: Path) -> None:
    """A model's folder, which as a path of Python's also has the clock installed."""
    metadata = folder / "clock_executor-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text("[nanovllm.executors]\nclock = processes\n")
    (folder / "config.json").write_text(json.dumps(MODEL))


@contextmanager
def clock_engine(client: str, step_ms: float) -> Iterator[AsyncLLM]:
    """A door whose engine runs on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        write_clock(Path(folder))
        sys.path.append(folder)  # an engine's process gets this path too
        try:
            llm = AsyncLLM(
                folder,
                load_format="dummy",
                device="cpu",
                dtype="float32",
                engine_client=client,
                executor={"name": "clock", "options": {"step_ms": step_ms}},
                limits={"max_num_seqs": 256, "max_model_len": 1024},
            )
            yield llm
            llm.close()
        finally:
            sys.path.remove(folder)


async def stream_all(llm: AsyncLLM, streams: int, tokens: int) -> None:
    async def one(number: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for _ in llm.generate([1, 2, 3, number % 64], params):
            pass

    await asyncio.gather(*(one(number) for number in range(streams)))


def measure(llm: AsyncLLM, streams: int, tokens: int, turns: int) -> tuple[float, float]:
    """Output tokens per second, and µs of this process's time per token; medians."""
    rates, costs = [], []
    for _ in range(turns):
        began, spent = time.perf_counter(), time.process_time()
        asyncio.run(stream_all(llm, streams, tokens))
        rates.append(streams * tokens / (time.perf_counter() - began))
        costs.append((time.process_time() - spent) / (streams * tokens) * 1e6)
    return median(rates), median(costs)


def message_costs(streams: int) -> tuple[float, float, int]:
    """µs to encode and to decode the deltas of a step, and the bytes of the message."""
    deltas = [
        OutputDelta(request_id=str(1000 + i), index=0, new_token_ids=[100 + i], wait_steps=1)
        for i in range(streams)
    ]
    message = b""
    rounds = max(20, 20_000 // streams)
    began = time.perf_counter()
    for _ in range(rounds):
        message = wire.encode(0, wire.DELTAS, [*map(wire.delta_row, deltas)])
    encoded = time.perf_counter()
    for _ in range(rounds):
        for row in wire.decode(message)[2]:
            wire.read_delta(row, row[0], row[1])
    decoded = time.perf_counter()
    return 1e6 * (encoded - began) / rounds, 1e6 * (decoded - encoded) / rounds, len(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    messages = Table(title="one message per step")
    for column in ("streams", "encode µs", "decode µs", "µs per delta", "bytes"):
        messages.add_column(column, justify="right")
    for streams in asked.streams:
        encode, decode, size = message_costs(streams)
        each = f"{(encode + decode) / streams:.2f}"
        messages.add_row(str(streams), f"{encode:.1f}", f"{decode:.1f}", each, str(size))
    table = Table(title=f"streams of {asked.tokens} tokens, steps of {asked.step_ms:g} ms")
    for column in ("engine", "streams", "tokens/s", "door's µs per token"):
        table.add_column(column, justify="right")
    for client in ("thread", "processes"):
        with clock_engine(client, asked.step_ms) as llm:
            for streams in asked.streams:
                rate, cost = measure(llm, streams, asked.tokens, asked.turns)
                table.add_row(client, str(streams), f"{rate:,.0f}", f"{cost:.1f}")
    console: Any = Console(width=100)
    console.print(messages)
    console.print(table)


if __name__ == "__main__":
    main()
