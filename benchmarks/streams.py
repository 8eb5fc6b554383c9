"""How soon the kernels of captured steps begin, by the streams on which a program has worked.

    python benchmarks/streams.py [--rows 1 8 64] [--attention triton] [--out FILE]

Each line is a process of its own:

- `engine`: the engine as it is, with all its work on one stream.
- `another`: another part of the program has worked on a stream of its own.

Columns are milliseconds of a decode step of so many requests of 512 tokens, with all that the
engine does; behind that, for a program may be late from its first real steps on, milliseconds of
the captured steps of so many rows of padding, replayed one behind the other; and microseconds in
which the host launches the smallest. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.worker import Worker
from nanovllm_core.worker.graphs import StepKey
from nanovllm_core.worker.runner import ModelRunner

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
CASES = ("engine", "another")
REPLAYS, LAUNCHES, TIMES = 60, 20, 4
PROMPT, SHORT, LONG = 512, 32, 160
SECONDS = 300.0
"""The longest that one process may take."""


def replayed(runner: ModelRunner, num_rows: int) -> tuple[float, float]:
    """Milliseconds of a replay, and microseconds of the host's part in it."""
    graphs, key = runner._graphs, StepKey.decode(runner.bucket(num_rows))
    assert graphs is not None
    for _ in range(3):
        graphs.replay(key)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(REPLAYS):
        graphs.replay(key)
    ended.record()
    ended.synchronize()
    launched = perf_counter()
    for _ in range(LAUNCHES):
        graphs.replay(key)
    launched = perf_counter() - launched
    runner.sampling.results.reset()  # these steps have reported, which no plan asked for
    return began.elapsed_time(ended) / REPLAYS, 1e6 * launched / LAUNCHES


def step_seconds(llm: LLM, num_rows: int) -> float:
    """Seconds of a decode step of `num_rows` requests: the difference of long and short answers."""

    def run(num_tokens: int) -> float:
        llm.reset_prefix_cache()
        prompts = [[7 + (row * 131 + at * 7) % 9000 for at in range(PROMPT)] for row in rows]
        asked = SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True)
        started = perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        return perf_counter() - started

    rows = range(num_rows)
    return min(run(LONG) - run(SHORT) for _ in range(TIMES)) / (LONG - SHORT)


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line, in its process."""
    settings: dict[str, Any] = {"load_format": "dummy", "limits": {"max_model_len": 4096}}
    with LLM(arguments.model, attention=arguments.attention, **settings) as llm:
        worker = cast(Worker, cast(Any, llm.engine._executor)._worker)
        runner = cast(ModelRunner, worker._runner)
        if case == "another":
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        steps = {rows: round(1e3 * step_seconds(llm, rows), 4) for rows in arguments.rows}
        with torch.cuda.stream(worker._stream):
            replays = {rows: replayed(runner, rows) for rows in arguments.rows}
        return {
            "case": case,
            "step_ms": steps,
            "replay_ms": {rows: round(ms, 4) for rows, (ms, _) in replays.items()},
            "launch_us": round(replays[arguments.rows[0]][1], 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments.case, arguments)))
        return
    found = []
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print("  ".join(f"{name}: {value}" for name, value in found[-1].items()), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
