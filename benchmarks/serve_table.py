"""The server's table: offline, closed loops, Poisson arrivals, long prompts beside, and the start.

    python benchmarks/serve_table.py --out FOLDER --model benchmarks/configs/qwen3-0.6b \\
        --set load_format=dummy --set limits.max_model_len=10240

Measures the nano workload offline, starts `nanovllm serve` with the same settings, and loads it
with the clients of `nanovllm bench serve`. With --url it measures an endpoint that runs, of any
server, and neither the start nor offline. Writes a result file for each part; prints one table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from words import write_words

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import write_record
from nanovllm_bench.serve.client import Endpoint
from nanovllm_bench.serve.compare import load_name
from nanovllm_bench.serve.load import LongPrompts
from nanovllm_bench.serve.measure import Plan, measure_endpoint, served_model
from nanovllm_bench.workloads import fixed_workload, nano_workload

START_SECONDS = 300.0
ARRIVAL_SECONDS = 10
COMMAND = [sys.executable, "-m", "nanovllm_core"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the parts of the table depend on."""

    processes: int
    vocab_size: int
    scale: float

    def plans(self) -> dict[str, Plan]:
        """The parts, by the name of their files; every one has prompts of its own."""
        rates, long = (10, 50, 100, 200), LongPrompts(1.0, 8192, vocab_size=self.vocab_size)
        parts = {
            "closed_1": Plan(nano_workload(self.count(16)), clients=[1]),
            "closed_64": Plan(nano_workload(self.count(256)), clients=[64]),
            "closed_256": Plan(nano_workload(self.count(256)), clients=[256]),
            **{
                f"open_{rate}": Plan(
                    fixed_workload(self.count(ARRIVAL_SECONDS * rate), 512, 128), rates=[rate]
                )
                for rate in rates
            },
            "long_prompts": Plan(
                fixed_workload(self.count(128), 512, 512), clients=[64], long_prompts=long
            ),
        }
        return {
            name: replace(
                plan,
                workload=plan.workload.within(self.vocab_size),
                seed=seed,
                processes=self.processes,
            )
            for seed, (name, plan) in enumerate(parts.items())
        }

    def count(self, requests: int) -> int:
        return max(1, round(requests * self.scale))


def tokenizer_of(model: Path, folder: Path) -> list[str]:
    """For a model's folder with no tokenizer: one with a word for each id, in `folder`."""
    if not (model / "config.json").exists() or (model / "tokenizer.json").exists():
        return []
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    write_words(folder, config["vocab_size"])
    return ["--set", f"tokenizer={folder}"]


def offline(arguments: Sequence[str], num_seqs: int, out: Path) -> float:
    """Output tok/s of the nano workload in one batch, with no server."""
    size = ["--num-seqs", str(num_seqs), "--runs", "2", "--out", str(out)]
    command = [*COMMAND, "bench", "throughput", *arguments, *size]
    subprocess.run(command, check=True, timeout=1800, stdout=sys.stderr)
    return float(json.loads(out.read_text(encoding="utf-8"))["tokens_per_second"])


@contextmanager
def served(arguments: Sequence[str], port: int) -> Iterator[tuple[str, float]]:
    """A server of ours: its URL, and the seconds from its command to its first token."""
    url = f"http://127.0.0.1:{port}"
    if answers(url):
        raise SystemExit(f"another server answers at {url}; give another --port")
    started = time.perf_counter()
    command = [*COMMAND, "serve", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            while not answers(url):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                if time.perf_counter() - started > START_SECONDS:
                    raise SystemExit(f"no token came within {START_SECONDS:g} s")
                time.sleep(0.02)
            yield url, time.perf_counter() - started
        finally:
            process.terminate()


def start_record(arguments: Sequence[str], seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds from the command to its first token, of one start after the other."""
    return {
        "benchmark": "serve_start",
        "arguments": list(arguments),
        "seconds": [round(one, 3) for one in seconds],
        "environment": describe_environment(),
    }


def answers(url: str) -> bool:
    """Whether a completion of one token comes."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            model = json.load(response)["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(json.load(response)["choices"])
    except urllib.error.HTTPError as error:
        if error.code in (429, 503):  # not ready
            return False
        raise SystemExit(f"the server answers {error.code}: {error.read()[:500]!r}") from None
    except OSError:
        return False


def measure(endpoint: Endpoint, settings: Settings, folder: Path) -> dict[str, Any]:
    """Every part, in a file of its own; the runs by part."""
    runs = {}
    for name, plan in settings.plans().items():
        record = measure_endpoint(endpoint, plan)
        write_record(folder / f"serve_{name}.json", record)
        runs[name] = record["runs"][0]
        print(f"{name}: {runs[name]['tokens_per_second']:,.0f} tok/s", file=sys.stderr)
    return runs


def show(runs: dict[str, Any], rate: float | None, seconds: float | None) -> None:
    """One line for each part."""
    times = (f"{name} p50 / p90 / p99" for name in ("first token, ms", "between tokens, ms"))
    table = Table("part", "output tok/s", "of offline", *times, "errors", "")
    for name, run in runs.items():
        table.add_row(
            load_name(run) + (" + long prompts" if run["long_prompts"] else ""),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['tokens_per_second'] / rate:.0%}" if rate and "closed" in name else "",
            *(
                " / ".join(f"{ms:.1f}" for ms in (run[one] or {}).values())
                for one in ("ttft_ms", "inter_token_ms")
            ),
            str(sum(one["count"] for one in run["errors"].values()) or ""),
            "INVALID" if run["invalid"] else "",
        )
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if rate is not None:
        console.print(f"offline: {rate:,.0f} output tok/s")
    if seconds is not None:
        console.print(f"start to the first served token: {seconds:.1f} s")
    console.print(table)
    for name, run in runs.items():
        for reason in run["invalid"]:
            console.print(f"{name}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--model", help="as `nanovllm serve` takes it")
    parser.add_argument("--set", action="append", default=[], help="a setting of the engine")
    parser.add_argument("--url", help="an endpoint that runs, instead")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=10_001)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    given = parser.parse_args()
    settings = Settings(given.processes, given.vocab_size, given.scale)

    def measured(url: str) -> dict[str, Any]:
        endpoint = Endpoint(url, "", "ids", {"temperature": 0.6, "ignore_eos": True})
        return measure(replace(endpoint, model=served_model(endpoint)), settings, given.out)

    if given.url:
        show(measured(given.url), None, None)
        return
    if given.model is None:
        parser.error("give --model, or --url of an endpoint that runs")
    arguments = ["--model", given.model, *(part for one in given.set for part in ("--set", one))]
    with tempfile.TemporaryDirectory() as folder:
        arguments += tokenizer_of(Path(given.model), Path(folder))
        rate = offline(arguments, settings.count(256), given.out / "offline.json")
        with served(arguments, given.port) as (url, seconds):
            write_record(given.out / "serve_start.json", start_record(arguments, [seconds]))
            show(measured(url), rate, seconds)


if __name__ == "__main__":
    main()
