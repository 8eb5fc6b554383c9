"""Whether `nanovllm bench serve` and guidellm measure the same, on the same endpoint.

    pip install guidellm    # in an environment of its own
    python benchmarks/serve_agreement.py --guidellm /path/to/guidellm [--url http://127.0.0.1:8000]

Without --url both measure an endpoint whose times are known (`nanovllm_bench.serve.timed`). Each
sends the same texts from as many clients, by turns. The medians over the turns are compared; the
exit status is 1 where two differ by more than --limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nanovllm_bench.record import write_record
from nanovllm_bench.serve.client import Endpoint
from nanovllm_bench.serve.measure import Plan, measure_endpoint, served_model
from nanovllm_bench.workloads import fixed_workload, text_of

INPUT_LEN = 64
Figures = Mapping[str, float]


def ours(endpoint: Endpoint, clients: int, requests: int, output_len: int, turn: int) -> Figures:
    """Of `nanovllm bench serve`."""
    workload = fixed_workload(requests, INPUT_LEN, output_len)
    (run,) = measure_endpoint(endpoint, Plan(workload, [clients], seed=turn))["runs"]
    if run["errors"] or run["invalid"]:
        print(f"turn {turn}, ours: {run['errors']} {run['invalid']}", file=sys.stderr)
    return {
        "first token p50, ms": run["ttft_ms"]["p50"],
        "first token p90, ms": run["ttft_ms"]["p90"],
        "per token p50, ms": run["tpot_ms"]["p50"],
        "per token p90, ms": run["tpot_ms"]["p90"],
        "end to end p50, ms": run["e2e_ms"]["p50"],
        "end to end p90, ms": run["e2e_ms"]["p90"],
        "output tok/s": run["tokens_per_second"],
    }


def guidellm(
    command: str, endpoint: Endpoint, clients: int, requests: int, output_len: int, turn: int
) -> Figures:
    """Of guidellm; its inter-token latency is the mean of each request, as our time per token."""
    workload = fixed_workload(requests, INPUT_LEN, output_len).relabelled(1001 + turn)
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        lines = (json.dumps({"prompt": text_of(ids)}) for ids in workload.prompts)
        prompts.write_text("\n".join(lines), encoding="utf-8")
        backend = f"target={endpoint.url},model={endpoint.model},max_tokens={output_len}"
        arguments = {
            "--backend": f"kind=openai_http,{backend},request_format={endpoint.path},http2=false",
            "--profile": f"kind=concurrent,streams={clients}",
            "--constraint": f"kind=max_requests,count={requests}",
            "--data": f"kind=json_file,path={prompts}",
            "--output": f"kind=json,path={out}",
        }
        flat = [part for pair in arguments.items() for part in pair]
        subprocess.run(
            [command, "run", *flat, "--disable-console"],
            check=True,
            timeout=1800,
            stdout=sys.stderr,
        )
        (result,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    wanted = ("time_to_first_token_ms", "request_latency", "inter_token_latency_ms")
    metrics = {name: result["metrics"][name]["successful"] for name in wanted}
    if metrics["time_to_first_token_ms"]["count"] != requests:
        print(f"turn {turn}, guidellm: not every request succeeded", file=sys.stderr)
    first, whole = metrics["time_to_first_token_ms"], metrics["request_latency"]
    between = metrics["inter_token_latency_ms"]["percentiles"]
    return {
        "first token p50, ms": first["percentiles"]["p50"],
        "first token p90, ms": first["percentiles"]["p90"],
        "per token p50, ms": between["p50"],
        "per token p90, ms": between["p90"],
        "end to end p50, ms": 1e3 * whole["percentiles"]["p50"],
        "end to end p90, ms": 1e3 * whole["percentiles"]["p90"],
        "output tok/s": result["metrics"]["output_tokens_per_second"]["successful"]["mean"],
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


def compare(measures: Mapping[str, Callable[[int], Figures]], turns: int) -> dict[str, Any]:
    """The median over the turns of each tool's figures, and by how much they differ."""
    raw: dict[str, list[Figures]] = {name: [] for name in measures}
    for turn in range(turns):
        for name, measure in measures.items():
            raw[name].append(measure(turn))
    medians = {
        name: {figure: median(one[figure] for one in runs) for figure in runs[0]}
        for name, runs in raw.items()
    }
    a, b = medians.values()
    return {
        "medians": medians,
        "differences": {figure: a[figure] / b[figure] - 1 for figure in a},
        "raw": raw,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--url", help="an endpoint that runs; default: one of known times")
    parser.add_argument("--prompts", choices=["text", "chat"], default="text")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--first-ms", type=float, default=60.0)
    parser.add_argument("--gap-ms", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    load = (given.clients, given.requests, given.output_len)

    def measured(url: str) -> dict[str, Any]:
        endpoint = Endpoint(url, "", given.prompts, {"ignore_eos": True})
        endpoint = replace(endpoint, model=served_model(endpoint))
        return compare(
            {
                "nanovllm bench serve": lambda turn: ours(endpoint, *load, turn),
                "guidellm": lambda turn: guidellm(given.guidellm, endpoint, *load, turn),
            },
            given.turns,
        )

    if given.url:
        result = measured(given.url)
    else:
        with timed_endpoint(given.first_ms, given.gap_ms) as url:
            result = measured(url)
    table = Table("", *result["medians"], "difference")
    for figure, difference in result["differences"].items():
        values = (f"{one[figure]:,.2f}" for one in result["medians"].values())
        table.add_row(figure, *values, f"{difference:+.1%}")
    Console().print(table)
    if given.out:
        write_record(given.out, {"benchmark": "serve_agreement", **result})
    return int(max(map(abs, result["differences"].values())) > given.limit)


if __name__ == "__main__":
    sys.exit(main())
