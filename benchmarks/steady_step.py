"""What the host spends on a steady decode step of a real worker, at batch 256, and on which part.

    python benchmarks/steady_step.py [--block-size 256] [--attention triton] [--out FILE]
    python benchmarks/steady_step.py --compare-waits

Qwen3-0.6B's shapes with random weights. The rows stand at different places in their blocks.
`benchmarks/host_step.py` counts the same without a GPU. `--compare-waits` takes turns between ways
to wait for a step: `adaptive` is the engine's own, `spin` looks without a pause, `yield` asks the
operating system between two looks, `nap` sleeps between them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.workloads import VOCABULARY
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.worker.polling import StepWait, Wait
from nanovllm_core.worker.runner import ModelRunner

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
STEPS = 150
PROMPT_LEN = 500
PARTS = ("host", "plan", "submit", "replay", "absorb")
"""`host` is all but the wait; `replay` is part of `submit`."""


def looking(pause: Callable[[], None]) -> Wait:
    """A wait that does `pause` between any two looks, and asks the device every thousandth time."""

    def wait(
        kind: Hashable, launched: float, is_done: Callable[[], bool], check: Callable[[], None]
    ) -> None:
        looks = 0
        while not is_done():
            looks += 1
            if looks % 1000 == 0:
                check()
            pause()

    return wait


def waits() -> dict[str, Wait]:
    return {
        "adaptive": StepWait(),
        "spin": looking(lambda: None),
        "yield": looking(lambda: time.sleep(0)),
        "nap": looking(lambda: time.sleep(50e-6)),
    }


class Stopwatch:
    """Adds up the time of calls by name; a list of one entry per step."""

    def __init__(self) -> None:
        self.current: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def time(self, owner: object, method: str, part: str) -> None:
        """Have every call of a method counted under `part`."""
        original = getattr(owner, method)

        def timed(*arguments: object) -> object:
            started = perf_counter()
            try:
                return original(*arguments)
            finally:
                self.current[part] += (perf_counter() - started) * 1e6

        setattr(owner, method, timed)

    def end_step(self) -> None:
        self.steps.append(dict(self.current))
        self.current.clear()


@contextmanager
def decoding(arguments: argparse.Namespace, num_steps: int) -> Iterator[tuple[LLM, ModelRunner]]:
    """An engine whose rows all decode, and will for `num_steps` steps."""
    longest = PROMPT_LEN + arguments.block_size + num_steps + 100
    limits = {"max_model_len": longest, "max_num_seqs": arguments.batch}
    cache = {"block_size": arguments.block_size}
    with LLM(
        arguments.model, load_format="dummy", attention=arguments.attention, limits=limits,
        cache=cache, device=arguments.device,
    ) as llm:  # fmt: skip
        rng = np.random.default_rng(0)
        for index in range(arguments.batch):
            # One row in block_size crosses a block at every step, as where requests come and go.
            length = PROMPT_LEN + index % llm.info.block_size
            prompt = rng.integers(0, min(VOCABULARY, llm.info.vocab_size), length)
            params = SamplingParams(temperature=0.6, max_tokens=num_steps + 100, ignore_eos=True)
            llm.engine.add_request(str(index), prompt.astype(np.int32), params)
        while llm.stats.waiting:
            llm.engine.step()
        for _ in range(40):
            llm.engine.step()
        yield llm, cast(Any, llm.engine._executor)._worker._runner


def window(llm: LLM, stopwatch: Stopwatch) -> dict[str, Any]:
    """Mean, median and 99th percentile of each part, over STEPS steps."""
    engine = llm.engine
    stopwatch.steps.clear()
    stopwatch.current.clear()
    started = perf_counter()
    for _ in range(STEPS):
        before = llm.stats.host_seconds
        engine.step()
        stopwatch.current["host"] = (llm.stats.host_seconds - before) * 1e6
        stopwatch.end_step()
    result: dict[str, Any] = {"step_ms": round((perf_counter() - started) / STEPS * 1e3, 3)}
    for part in PARTS:
        times = np.array([step.get(part, 0.0) for step in stopwatch.steps])
        median, p99 = np.percentile(times, (50, 99))
        numbers = {"mean": times.mean(), "median": median, "p99": p99}
        result[part] = {name: round(float(number), 1) for name, number in numbers.items()}
    return result


def print_table(results: list[dict[str, Any]]) -> None:
    table = Table(title="host time of a decode step: mean / median / p99, µs")
    for column in ("wait", "step ms", *PARTS):
        table.add_column(column, justify="right")
    for result in results:
        cells = ["/".join(f"{number:.0f}" for number in result[part].values()) for part in PARTS]
        table.add_row(result["wait"], f"{result['step_ms']:.2f}", *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--compare-waits", action="store_true")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    ways = waits() if arguments.compare_waits else {"adaptive": StepWait()}
    results = []
    with decoding(arguments, STEPS * arguments.windows * len(ways)) as (llm, runner):
        stopwatch = Stopwatch()
        stopwatch.time(llm.engine._planner, "plan", "plan")
        stopwatch.time(llm.engine._executor, "submit", "submit")
        if runner._graphs is not None:
            stopwatch.time(runner._graphs, "replay", "replay")
        stopwatch.time(llm.engine, "_absorb", "absorb")
        for _ in range(arguments.windows):
            for name, wait in ways.items():
                runner.sampling.results.wait = wait
                results.append({"wait": name, **window(llm, stopwatch)})
        print_table(results)
        if arguments.out:
            document = {
                "batch": arguments.batch,
                "block_size": llm.info.block_size,
                "attention": llm.info.attention,
                "steps_per_window": STEPS,
                "windows": results,
                "environment": describe_environment(),
            }
            arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
