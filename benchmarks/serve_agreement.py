"""Whether `nanovllm bench serve` and guidellm measure the same, on the same endpoint.

    pip install guidellm    # in an environment of its own; 0.8.1 was tried
    python benchmarks/serve_agreement.py --guidellm /path/to/guidellm [--url http://127.0.0.1:8000]

Without --url both measure an endpoint whose times are known (`nanovllm_bench.serve.timed`). Each
sends the same fields and as long texts from as many clients, in one process, by turns. The medians
over the turns are compared. The exit status is 1 where two differ by more than --limit.

On a machine that does other work, a server's speed differs more between two turns than the tools
do. --beside-server divides the mean times of each turn by those that `nanovllm serve` itself
counted in that turn (`/metrics`), and compares the quotients.

No two turns share a prompt. A second comparison at the same server needs another --seed, or its
prefix cache knows the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.latency import WARM_UP_REQUESTS
from nanovllm_bench.record import write_record
from nanovllm_bench.serve.client import Endpoint
from nanovllm_bench.serve.measure import (
    MAX_LOADS,
    Plan,
    describe_endpoint,
    measure_endpoint,
    served_model,
)
from nanovllm_bench.workloads import fixed_workload, text_of

INPUT_LEN = 64
MAX_TURNS = 10
"""Of one seed, before prompts are those of the next."""
LATE = "own event loop late p99, ms"
"""A figure of ours alone; a run with more than 5 is marked invalid by `bench serve`."""
SERVER_METRICS = {
    "first token": "http_first_byte_seconds",
    "end to end": "http_request_duration_seconds",
}
"""Of `nanovllm serve`, in the process that speaks HTTP."""
SAMPLE = re.compile(r"nanovllm:(?P<name>http_\w+)\{(?P<labels>.*)\} (?P<value>\S+)$")
COUNTED_SECONDS = 0.5
"""Until the last request is counted."""
SAME_FIELDS = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
"""What guidellm sends beside model, prompt and max_tokens, so that ours asks for the same."""
Figures = Mapping[str, float]
Measure = Callable[[int], Figures]
"""One tool's measurement; it gets the number of the turn."""
Runs = dict[str, list[Figures]]


@dataclass(frozen=True, slots=True)
class Load:
    """What each tool sends in each turn."""

    clients: int
    requests: int
    output_len: int
    seed: int = 0
    warm_up: int = WARM_UP_REQUESTS
    """Requests of ours that are not measured; none beside the server, which counts them too."""

    def plan(self, turn: int) -> Plan:
        """Of our own turn."""
        workload = fixed_workload(self.requests, INPUT_LEN, self.output_len)
        return Plan(
            workload, [self.clients], seed=MAX_TURNS * self.seed + turn, warm_up=self.warm_up
        )

    def texts(self, turn: int) -> list[str]:
        """The prompts of guidellm's turn: those of a second load of our plan, which it has not."""
        plan = self.plan(turn)
        shifted = plan.workload.relabelled(2 * (MAX_LOADS * plan.seed + 1))
        return [text_of(ids) for ids in shifted.prompts]


def ours(endpoint: Endpoint, load: Load, turn: int) -> Figures:
    """Of `nanovllm bench serve`."""
    (run,) = measure_endpoint(endpoint, load.plan(turn))["runs"]
    asked, came = load.requests * load.output_len, run["output_tokens"]
    if run["errors"] or came != asked:
        raise SystemExit(f"ours has {came} of {asked} tokens; errors: {run['errors']}")
    return figures_of_run(run)


def figures_of_run(run: Mapping[str, Any]) -> Figures:
    """The figures that are compared, of a run in our record."""
    return {
        "first token p50, ms": run["ttft_ms"]["p50"],
        "first token p90, ms": run["ttft_ms"]["p90"],
        "per token p50, ms": run["tpot_ms"]["p50"],
        "per token p90, ms": run["tpot_ms"]["p90"],
        "end to end p50, ms": run["e2e_ms"]["p50"],
        "end to end p90, ms": run["e2e_ms"]["p90"],
        "output tok/s": run["tokens_per_second"],
        "first token mean, ms": fmean(run["raw_ttft_ms"]),
        "end to end mean, ms": fmean(run["raw_e2e_ms"]),
        LATE: run["client"]["lag_ms"]["p99"],
    }


def guidellm(command: str, endpoint: Endpoint, load: Load, turn: int) -> Figures:
    """Of guidellm. A dataset that states the tokens of an answer makes it send `ignore_eos`."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        lines = (
            json.dumps({"prompt": text, "output_tokens_count": load.output_len})
            for text in load.texts(turn)
        )
        prompts.write_text("\n".join(lines), encoding="utf-8")
        backend = f"target={endpoint.url},model={endpoint.model}"
        arguments = {
            "--backend": f"kind=openai_http,{backend},request_format={endpoint.path},http2=false",
            "--profile": f"kind=concurrent,streams={load.clients}",
            "--constraint": f"kind=max_requests,count={load.requests}",
            "--data": f"kind=json_file,path={prompts}",
            "--output": f"kind=json,path={out}",
        }
        flat = [part for pair in arguments.items() for part in pair]
        subprocess.run(
            [command, "run", *flat, "--disable-console"],
            check=True,
            timeout=1800,
            stdout=sys.stderr,
            env={**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        )
        report = json.loads(out.read_text(encoding="utf-8"))
    return figures_of_report(report, load)


def figures_of_report(report: Mapping[str, Any], load: Load) -> Figures:
    """The figures of guidellm's report under our names.

    Its inter-token latency is the mean of each request, which is our time per token. SystemExit
    where an answer failed or has another number of tokens than it was asked for.
    """
    (result,) = report["benchmarks"]

    def answers(metric: str) -> Any:
        return result["metrics"][metric]["successful"]

    first, whole = answers("time_to_first_token_ms"), answers("request_latency")
    between = answers("inter_token_latency_ms")["percentiles"]
    asked, came = load.requests * load.output_len, answers("output_token_count")["total_sum"]
    if whole["count"] != load.requests or round(came) != asked:
        raise SystemExit(
            f"guidellm has {whole['count']} of {load.requests} answers, and {came:.0f} of {asked} "
            "tokens; does the endpoint know ignore_eos?"
        )
    return {
        "first token p50, ms": first["percentiles"]["p50"],
        "first token p90, ms": first["percentiles"]["p90"],
        "per token p50, ms": between["p50"],
        "per token p90, ms": between["p90"],
        "end to end p50, ms": 1e3 * whole["percentiles"]["p50"],
        "end to end p90, ms": 1e3 * whole["percentiles"]["p90"],
        "output tok/s": answers("output_tokens_per_second")["mean"],
        "first token mean, ms": first["mean"],
        "end to end mean, ms": 1e3 * whole["mean"],
    }


@contextmanager
def timed_endpoint(first_ms: float, gap_ms: float) -> Iterator[str]:
    """The URL of an endpoint of known times, in a process of its own."""
    words = ["--first-ms", str(first_ms), "--gap-ms", str(gap_ms)]
    with subprocess.Popen(
        [sys.executable, "-m", "nanovllm_bench.serve.timed", *words],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def version_of(command: str) -> str:
    """As guidellm says it."""
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True)
    return said.stdout.split()[-1]


def beside_server(url: str, measure: Measure) -> Measure:
    """The mean times of a measurement over those that the server counted meanwhile."""

    def quotients(turn: int) -> Figures:
        before = server_sums(url)
        figures = measure(turn)
        time.sleep(COUNTED_SECONDS)
        return over_server(figures, before, server_sums(url))

    return quotients


def over_server(figures: Figures, before: Figures, after: Figures) -> Figures:
    """Means of a tool over the server's, from the server's sums and counts on both sides."""
    late = {LATE: figures[LATE]} if LATE in figures else {}
    return late | {
        f"{name} / server's": figures[f"{name} mean, ms"]
        / (1e3 * (after[f"{metric}_sum"] - before[f"{metric}_sum"]))
        * (after[f"{metric}_count"] - before[f"{metric}_count"])
        for name, metric in SERVER_METRICS.items()
    }


def server_sums(url: str) -> Figures:
    """Sums and counts of the server's histograms, of the completions of both endpoints."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    sums: dict[str, float] = defaultdict(float)
    for line in lines:
        if (found := SAMPLE.match(line)) and "completions" in found["labels"]:
            sums[found["name"]] += float(found["value"])
    return sums


def by_turns(measures: Mapping[str, Measure], turns: int) -> Runs:
    """One tool after the other; every second turn in the other order, which favours nobody."""
    raw: Runs = {name: [] for name in measures}
    for turn in range(turns):
        for name in [*measures][:: -1 if turn % 2 else 1]:
            raw[name].append(measures[name](turn))
    return raw


def compare(raw: Runs) -> dict[str, Any]:
    """The median over the turns of each tool's figures, and by how much they differ."""
    medians = {
        name: {figure: median(one[figure] for one in runs) for figure in runs[0]}
        for name, runs in raw.items()
    }
    a, b = medians.values()
    return {
        "medians": medians,
        "differences": {figure: a[figure] / b[figure] - 1 for figure in a if figure in b},
        "raw": raw,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--url", help="an endpoint that runs; default: one of known times")
    parser.add_argument("--prompts", choices=["text", "chat"], default="text")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside-server", action="store_true", help="see above; needs --url")
    parser.add_argument("--first-ms", type=float, default=60.0)
    parser.add_argument("--gap-ms", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.beside_server and (not given.url or given.prompts == "chat"):
        parser.error("--beside-server needs the --url of a `nanovllm serve`, and --prompts text")
    if given.turns > MAX_TURNS:
        parser.error(f"--turns is at most {MAX_TURNS}")
    warm_up = 0 if given.beside_server else WARM_UP_REQUESTS
    load = Load(given.clients, given.requests, given.output_len, given.seed, warm_up)

    def measured(url: str) -> dict[str, Any]:
        endpoint = Endpoint(url, "", given.prompts, SAME_FIELDS)
        endpoint = replace(endpoint, model=served_model(endpoint))
        measures: dict[str, Measure] = {
            "nanovllm bench serve": lambda turn: ours(endpoint, load, turn),
            "guidellm": lambda turn: guidellm(given.guidellm, endpoint, load, turn),
        }
        if given.beside_server:
            measures = {name: beside_server(url, one) for name, one in measures.items()}
        raw = by_turns(measures, given.turns)
        described = {"endpoint": describe_endpoint(endpoint), "prompts": given.prompts}
        return described | compare(raw)

    if given.url:
        result = measured(given.url)
    else:
        with timed_endpoint(given.first_ms, given.gap_ms) as url:
            result = measured(url)
    table = Table("", *result["medians"], "difference")
    for figure, difference in result["differences"].items():
        values = (f"{one[figure]:,.3f}" for one in result["medians"].values())
        table.add_row(figure, *values, f"{difference:+.1%}")
    Console().print(table)
    if given.out:
        record = {
            "benchmark": "serve_agreement",
            "guidellm": version_of(given.guidellm),
            "load": asdict(load) | {"input_len": INPUT_LEN},
            "known": None if given.url else {"first_ms": given.first_ms, "gap_ms": given.gap_ms},
            "beside_server": given.beside_server,
            "limit": given.limit,
            "environment": describe_environment(),
        }
        write_record(given.out, record | result)
    return int(max(map(abs, result["differences"].values())) > given.limit)


if __name__ == "__main__":
    sys.exit(main())
