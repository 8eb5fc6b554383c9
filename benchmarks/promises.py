"""What this project promises of one GPU, measured on one host.

    python benchmarks/promises.py [--parts start qwen3-0.6b ...] [--out FILE]

Each row is of a model's shapes with random weights, and has the least that it may be, or the most
where it is a time. The limits are for an H200. An eighth of a workload's requests run first, and do
not count; of the counted runs the best does. Exits with 1 where a promise is not kept. Parts may
run at once on several GPUs of the host, but for the starts, which want all of its processors.
`start-files` writes 16.4 GB into a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import write_record
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import load_format, nano_workload
from nanovllm_core import LLM

FOLDER = Path(__file__).parent
PREFILL = FOLDER.parent / "plugins/attention_triton/benchmarks/attention_prefill.py"
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


def results_of(script: Path, *arguments: str) -> Any:
    """What another benchmark writes, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(script), *arguments, "--out", str(file)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(file.read_text(encoding="utf-8"))


def measure_start() -> Iterator[Row]:
    """Starts of Qwen3-0.6B: that with an empty Triton cache, and the best with the one it left."""
    starts = results_of(FOLDER / "start.py", "--attention", "triton")["starts"]
    for cache, most in (("empty", 12.0), ("warm", 5.0)):
        best = min(start["ready"] for start in starts if start["triton_cache"] == cache)
        yield Row(f"qwen3-0.6b, start, {cache} cache", "s", best, most, is_time=True)


def measure_start_from_files() -> Iterator[Row]:
    """The best warm start of Qwen3-8B from files that the system holds in memory."""
    from checkpoints import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_checkpoint(FOLDER / "configs" / "qwen3-8b", Path(folder))
        starts = results_of(FOLDER / "start.py", "--model", folder)["starts"]
    warm = [start for start in starts if start["triton_cache"] == "warm"]
    name = "qwen3-8b from safetensors"
    yield Row(f"{name}, start", "s", min(start["ready"] for start in warm), 9.0, is_time=True)
    rate = num_bytes / 1e9 / min(start["model"] for start in warm)
    yield Row(f"{name}, weights", "GB/s", round(rate, 2), 6.0)


def measure_prompts() -> Iterator[Row]:
    """Attention of long prompts alone, by the kernel that is shipped, in blocks of 256 tokens."""
    rows = results_of(PREFILL, "--shipped")["rows"]
    best = max(row["tflop_per_s"]["8x8192"] for row in rows if row["block_size"] == 256)
    yield Row("prompts of 0.6B alone, 8 x 8192", "TFLOP/s", round(best, 1), 560)


MEASURES: dict[str, Callable[[], Iterator[Row]]] = {
    "start": measure_start,
    "start-files": measure_start_from_files,
    "prompts": measure_prompts,
    **{name: partial(measure, part) for name, part in PARTS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.parts:
        for row in MEASURES[name]():
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
