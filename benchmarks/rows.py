"""The rows that no change may slow down, of several installed versions by turns.

    pip install --no-deps --target /tmp/before WHEELS...     # of each version
    python benchmarks/rows.py before=/tmp/before after=/tmp/after [--turns 5] [--out FILE]

The six workloads of docs/performance.md, batch 1 streamed, latency under arrivals, the host's time
of a steady step, and the start. Each measurement of a version is a process of its own, and versions
take turns, so a slow minute of the machine meets all of them. A first start of each, which compiles
its kernels, is reported apart. The best of the turns counts, and of latencies the percentiles over
all turns. Changes are of the last version, against each of the others. Run nothing beside it.

Only `LLM`, `SamplingParams` and an engine's `add_request` and `step` are used, which old versions
have too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
VOCABULARY = 10_000
FIXED = {
    (16, 512, 512): 2,
    (64, 512, 512): 2,
    (1, 512, 512): 3,
    (16, 2048, 1024): 1,
    (64, 1024, 1024): 1,
}
"""Sequences, prompt and output tokens; how often it runs in a process, of which the best counts."""
LATENCIES = {"first": "first token", "between": "between tokens"}
SECONDS = 600.0
"""The longest that one process may take."""

Requests = tuple[list[list[int]], list[int]]
"""Prompts, and the tokens that each asks for."""


def fixed(num_seqs: int, input_len: int, output_len: int, scale: float) -> Requests:
    """Prompts of one length."""
    rng = random.Random(0)
    length = max(2, int(input_len * scale))
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(num_seqs)]
    return prompts, [max(2, int(output_len * scale))] * num_seqs


def nano(scale: float) -> Requests:
    """nano-vllm's benchmark: 256 requests, lengths uniform in 100 to 1024."""
    rng = random.Random(0)
    most, least = max(3, int(1024 * scale)), max(2, int(100 * scale))
    lengths = [rng.randint(least, most) for _ in range(256)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    return prompts, [rng.randint(least, most) for _ in range(256)]


class Rows:
    """The rows of the version that is imported, on one engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from nanovllm_core import LLM, SamplingParams

        self.params: Any = SamplingParams
        self.scale: float = arguments.scale
        folder = Path(arguments.model)
        is_dummy = folder.is_dir() and not any(folder.glob("*.safetensors"))
        self.llm: Any = LLM(
            arguments.model,
            load_format="dummy" if is_dummy else "auto",
            attention=arguments.attention,
            limits={"max_model_len": arguments.max_model_len},
        )
        self.vocab_size = min(VOCABULARY, self.llm.info.vocab_size)

    def asking(self, temperature: float, num_tokens: int) -> Any:
        return self.params(
            temperature=temperature, top_p=1.0, top_k=0, max_tokens=num_tokens, ignore_eos=True
        )

    def prompts(self, requests: Requests) -> list[list[int]]:
        return [[token % self.vocab_size for token in prompt] for prompt in requests[0]]

    def throughput(self, requests: Requests, temperature: float, runs: int) -> Iterator[float]:
        """Output tokens per second of the best run, and microseconds of a steady step's host."""
        prompts, lengths = self.prompts(requests), requests[1]
        rates, hosts = [], []
        for _ in range(runs):
            self.llm.reset_prefix_cache()
            asked = [self.asking(temperature, length) for length in lengths]
            before, started = self.llm.stats, time.perf_counter()
            outputs = self.llm.generate(prompts, asked, use_tqdm=False)
            rates.append(sum(lengths) / (time.perf_counter() - started))
            after = self.llm.stats
            assert [len(output.token_ids) for output in outputs] == lengths
            steps = max(1, after.steady_steps - before.steady_steps)
            hosts.append(1e6 * (after.steady_seconds - before.steady_seconds) / steps)
        yield from (round(max(rates), 1), round(min(hosts), 1))

    def streamed(self) -> float:
        """Output tokens per second of one request whose tokens are taken one by one."""
        requests = fixed(1, 512, 512, self.scale)
        [prompt], [length] = self.prompts(requests), requests[1]
        self.llm.reset_prefix_cache()
        started = time.perf_counter()
        for _ in self.llm.stream(prompt, self.asking(0.0, length)):
            pass
        return round(length / (time.perf_counter() - started), 1)

    def latencies(self, count: int, rate: float) -> dict[str, list[float]]:
        """Milliseconds to each first token, and between tokens, of Poisson arrivals of 512/128.

        This thread adds the requests and takes the engine's steps.
        """
        self.llm.reset_prefix_cache()
        engine, rng = self.llm.engine, random.Random(3)
        requests = fixed(count, 512, 128, self.scale)
        prompts, length = self.prompts(requests), requests[1][0]
        arrivals = [0.0]
        while len(arrivals) < count:
            arrivals.append(arrivals[-1] + rng.expovariate(rate))
        seen: list[list[float]] = [[] for _ in arrivals]
        sent, started = 0, time.perf_counter()
        while sent < count or engine.has_unfinished():
            while sent < count and arrivals[sent] <= time.perf_counter() - started:
                asked = self.asking(0.6, length)
                engine.add_request(f"row-{sent}", prompts[sent], asked, stream=True)
                sent += 1
            if not engine.has_unfinished():
                time.sleep(max(0.0, arrivals[sent] - (time.perf_counter() - started)))
                continue
            for output in engine.step():
                now = time.perf_counter() - started
                times = seen[int(output.request_id.removeprefix("row-"))]
                times += [now] * len(output.new_token_ids)
        assert all(len(times) == length for times in seen)
        between = [b - a for times in seen for a, b in pairwise(times)]
        first = [times[0] - arrived for times, arrived in zip(seen, arrivals, strict=True)]
        return {"first": [1e3 * s for s in first], "between": [1e3 * s for s in between]}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows of one version, in its process; only the start where `--start` is given."""
    rows = Rows(arguments)
    found: dict[str, Any] = {"start": round(time.time() - arguments.began, 3)}
    with rows.llm:
        if arguments.start:
            return found
        workloads = {f"{n} x {i}/{o}": fixed(n, i, o, rows.scale) for n, i, o in FIXED}
        for name, runs in zip(workloads, FIXED.values(), strict=True):
            temperature = 0.0 if name.startswith("1 x") else 0.6
            found[name], found[f"host of {name}"] = rows.throughput(
                workloads[name], temperature, runs
            )
        found["nano"], found["host of nano"] = rows.throughput(nano(rows.scale), 0.6, 1)
        found["1 streamed"] = max(rows.streamed() for _ in range(2))
        found.update(rows.latencies(arguments.requests, arguments.rate))
    return found


def in_new_process(tree: str, cache: str, options: Sequence[str]) -> dict[str, Any]:
    """`measure` of the version in the folder `tree`."""
    path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-P", __file__, *options, "--began", repr(time.time())]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def summarise(turns: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """By row the figure of each version: the best of its turns, of latencies p50 and p99."""
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for name, found in turns.items():
        for row in found[0]:
            values = [one[row] for one in found]
            if row in LATENCIES:
                every = [ms for turn in values for ms in turn]
                for share in (0.5, 0.99):
                    rows[f"{LATENCIES[row]} p{share * 100:g}, ms"][name] = percentile(every, share)
            else:
                best = min if row == "start" or row.startswith("host of") else max
                rows[row][name] = best(values)
    return dict(rows)


def show(rows: dict[str, dict[str, float]]) -> None:
    for row, figures in rows.items():
        *_, last = figures
        changes = [
            f"{last} is {figures[last] / value - 1:+.1%} of {name}"
            for name, value in figures.items()
            if name != last and value
        ]
        shown = ", ".join(f"{name} {value:,}" for name, value in figures.items())
        print(f"{row:28} {shown}; {'; '.join(changes)}".rstrip("; "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=320, help="of the latency under arrivals")
    parser.add_argument("--rate", type=float, default=40.0, help="their arrivals per second")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shorten all sequences, for trials"
    )
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.began is not None:
        print(json.dumps(measure(arguments)))
        return
    versions = dict(version.split("=", 1) for version in arguments.versions)
    if not versions or "" in versions.values():
        parser.error("name the versions and their folders: before=/tmp/before after=/tmp/after")
    options = [option for option in sys.argv[1:] if option not in arguments.versions]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as caches:
        for name, tree in versions.items():
            first = in_new_process(tree, f"{caches}/{name}", [*options, "--start"])
            print(f"{name}: start with empty caches {first['start']} s", flush=True)
        for _ in range(arguments.turns):
            for name, tree in versions.items():
                turns[name].append(in_new_process(tree, f"{caches}/{name}", options))
    rows = summarise(turns)
    show(rows)
    if arguments.out:
        record = {"versions": versions, "rows": rows, "turns": turns}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
