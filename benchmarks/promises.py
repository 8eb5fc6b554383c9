"""The throughputs and starts that this project promises of one GPU, measured on one host.

    python benchmarks/promises.py [--parts start qwen3-0.6b ...] [--out FILE]

Each row is of a model's shapes with random weights, and has the least that it may be, or the most
where it is a time. The limits are for an H200. An eighth of a workload's requests run first, and do
not count; of the counted runs the best does. Exits with 1 where a promise is not kept. Parts may
run at once on several GPUs of the host, but for `start`, which wants all of its processors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import write_record
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import load_format, nano_workload
from nanovllm_core import LLM

FOLDER = Path(__file__).parent
TEMPERATURE = 0.6
BY_LPT = {"scheduler": "lpt", "limits": {"max_num_batched_tokens": 384}}
BY_LPT_IN_LARGE_STEPS = {"scheduler": "lpt", "limits": {"max_num_batched_tokens": 4096}}


@dataclass(frozen=True, slots=True)
class Row:
    """One promise: `value` is to be `limit` at least, or at most where it `is_time`."""

    name: str
    unit: str
    value: float
    limit: float
    is_time: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the value is on its side of the limit."""
        return self.value <= self.limit if self.is_time else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Part:
    """An engine, and its workloads with the least tokens per second; `runs` of each count."""

    model: str
    least: Mapping[str, float]
    runs: int
    settings: Mapping[str, Any]
    asking: Mapping[str, float] | None = None
    """The least shares of plain requests that those of `asking.py` may reach."""


PARTS = {
    "qwen3-0.6b-lpt": Part(
        "qwen3-0.6b",
        {"nano": 29_000},
        runs=3,
        settings={"attention": "triton", **BY_LPT_IN_LARGE_STEPS},
    ),
    "qwen3-0.6b": Part(
        "qwen3-0.6b",
        {
            "1 x 512/512": 1_650,
            "16 x 512/512": 14_000,
            "64 x 512/512": 25_800,
            "64 x 1024/1024": 17_300,
            "16 x 2048/1024": 8_300,
        },
        runs=3,
        settings={"attention": "triton"},
        asking={
            "top_k 20, top_p 0.95": 0.97,
            "repetition_penalty 1.1": 0.96,
            "logprobs 5": 0.96,
        },
    ),
    "qwen3-8b": Part("qwen3-8b", {"1 x 512/512": 240, "16 x 512/512": 3_100}, runs=2, settings={}),
    "qwen3-8b-lpt": Part("qwen3-8b", {"nano": 10_400}, runs=2, settings=BY_LPT),
    "qwen3-32b": Part("qwen3-32b", {"1 x 512/512": 60}, runs=1, settings={}),
    "qwen3-32b-lpt": Part("qwen3-32b", {"nano": 3_120}, runs=1, settings=BY_LPT),
}
START = "start"
"""The part that starts an engine in processes of their own."""
STARTS = {"empty": 12.0, "warm": 5.0}
"""Seconds at most of a start of Qwen3-0.6B, by the Triton cache that it finds."""


def measure(part: Part) -> Iterator[Row]:
    """The rows of an engine, as they are measured."""
    from parallel import workload_of

    config = FOLDER / "configs" / part.model
    model = str(config) if config.is_dir() else part.model
    settings = {"load_format": load_format(model), "max_model_len": 4096, **part.settings}
    scheduler = part.settings.get("scheduler")
    by = f" by {scheduler}" if scheduler else ""
    with LLM(model, **settings) as llm:
        for name, least in part.least.items():
            workload = workload_of(name, 1).within(llm.info.vocab_size)
            timed_generate(llm, workload.share(8), TEMPERATURE)
            best = min(timed_generate(llm, workload, TEMPERATURE) for _ in range(part.runs))
            rate = workload.num_output_tokens / best
            yield Row(f"{part.model}, {name}{by}", "tok/s", round(rate, 1), least)
        if part.asking:
            yield from measure_asking(llm, part)


def measure_asking(llm: LLM, part: Part) -> Iterator[Row]:
    """What requests that ask for more reach of plain ones, by `asking.py`."""
    from asking import measure as by_kind

    kinds = by_kind(llm, nano_workload(), turns=2)
    for kind, least in (part.asking or {}).items():
        yield Row(f"{part.model}, nano, {kind}", "of plain", kinds[kind]["to_plain"], least)


def measure_start() -> Iterator[Row]:
    """Starts by `start.py`: that with an empty cache, and the best with the one it left."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "starts.json"
        command = [sys.executable, str(FOLDER / "start.py"), "--attention", "triton"]
        subprocess.run([*command, "--out", str(file)], check=True, stdout=sys.stderr)
        starts = json.loads(file.read_text(encoding="utf-8"))["starts"]
    for cache, most in STARTS.items():
        best = min(start["ready"] for start in starts if start["triton_cache"] == cache)
        yield Row(f"qwen3-0.6b, start, {cache} cache", "s", best, most, is_time=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [START, *PARTS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.parts:
        for row in measure_start() if name == START else measure(PARTS[name]):
            rows.append(row)
            bound = "at most" if row.is_time else "at least"
            kept = "" if row.is_kept else "  MISSED"
            figures = f"{row.value:10,.6g} {row.unit:8s} {bound} {row.limit:,.6g}"
            print(f"{row.name:44s} {figures}{kept}", flush=True)
    if arguments.out is not None:
        document = {
            "benchmark": "promises",
            "rows": [asdict(row) for row in rows],
            "environment": describe_environment(),
        }
        write_record(arguments.out, document)
    missed = [row.name for row in rows if not row.is_kept]
    if missed:
        sys.exit(f"promises that were not kept: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
