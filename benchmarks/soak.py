"""Random traffic for minutes: every block comes back, every token comes again, no memory grows.

    python benchmarks/soak.py --seed 1 --minutes 9 --out one.json
    python benchmarks/soak.py --seed 1 --minutes 9 --out again.json     # in another process
    python benchmarks/soak.py --compare one.json again.json
    python benchmarks/soak.py --seed 1 --steps 5000 --replay            # both, one after the other

Prompts of all lengths, some with a common prefix, outputs of all lengths, aborts, quiet and busy
times, on a cache too small for the rows, so that requests are preempted. What happens before a step
follows from the seed and the steps before it, never from the clock: a second run of the same seed
makes the same plans, and must give the same tokens. Where two runs did not make equally many steps,
the steps that both made are compared. A model folder without weights gets random ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xxhash

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.workloads import load_format
from nanovllm_core import LLM, SamplingParams

MOODS = (0.0, 0.3, 1.0, 3.0)
"""Requests arriving, relative to how many the rows can serve."""
MOOD_STEPS = 200
SAMPLE_SECONDS = 1.0
WARM_UP_SHARE = 0.25
"""Of the time; memory is compared from then on."""
MIN_READINGS = 40
MAX_GROWTH_MIB = 16.0


class Traffic:
    """What happens before each step; `max_live` requests at most, of `max_len` tokens at most."""

    def __init__(self, seed: int, vocab_size: int, max_len: int, max_num_seqs: int) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.quarter = max_len // 4
        self.max_live = 2 * max_num_seqs
        self.fair_rate = max_num_seqs * log(max_len / 2) / (max_len / 2)
        self.rate = 0.0
        self.num_steps = 0
        self.prefixes = [self._ids(self.rng.randint(1, self.quarter)) for _ in range(8)]

    def next_step(self, live: Sequence[str]) -> tuple[list[tuple[list[int], SamplingParams]], str]:
        """Prompts that arrive now, and the id of a live request to abort, or ""."""
        rng = self.rng
        if self.num_steps % MOOD_STEPS == 0:
            self.rate = rng.choice(MOODS) * self.fair_rate
        self.num_steps += 1
        count = int(self.rate) + (rng.random() < self.rate % 1)
        arrivals = [self._request() for _ in range(min(count, self.max_live - len(live)))]
        abort = rng.choice(live) if live and rng.random() < 0.03 else ""
        return arrivals, abort

    def _request(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prefix = rng.choice(self.prefixes) if rng.random() < 0.5 else []
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.6, 1.0)),
            top_p=0.9 if rng.random() < 0.05 else 1.0,  # takes the sampler's tail
            max_tokens=self._length(2 * self.quarter),
            ignore_eos=rng.random() < 0.7,
        )
        return prefix + self._ids(self._length(self.quarter)), params

    def _length(self, longest: int) -> int:
        """1 to `longest`, short ones as often as long ones on a logarithmic scale."""
        return int(exp(self.rng.uniform(0.0, log(longest))))

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]


@dataclass
class Run:
    """What one run was, and what came of it.

    `finished` has three entries per finished request, in order: the step, the request's number, and
    a digest of its tokens and of why it ended. `memory` has (seconds, MiB of the host's memory, MiB
    of the device's).
    """

    seed: int
    settings: dict[str, Any]
    steps: int = 0
    finished: array[int] = field(default_factory=lambda: array("Q"))
    memory: list[tuple[float, float, float]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def finish(self, number: int, reason: str | None, token_ids: Sequence[int]) -> None:
        content = f"{reason} ".encode() + np.asarray(token_ids, dtype=np.int32).tobytes()
        self.finished.extend((self.steps, number, xxhash.xxh3_64_intdigest(content)))

    def read_memory(self, seconds: float) -> None:
        device = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        self.memory.append((round(seconds, 1), _host_bytes() / 2**20, device / 2**20))

    def to_json(self) -> dict[str, Any]:
        finished = np.array(self.finished, dtype=np.uint64).reshape(-1, 3).tolist()
        return {
            "seed": self.seed,
            "steps": self.steps,
            **self.counts,
            "host_growth_mib": growth([host for _, host, _ in self.memory]),
            "device_growth_mib": growth([device for _, _, device in self.memory]),
            "settings": self.settings,
            "environment": describe_environment(),
            "memory": self.memory,
            "finished": [[step, number, f"{digest:016x}"] for step, number, digest in finished],
        }


def growth(readings: Sequence[float]) -> float | None:
    """The median of the last tenth less that of the first tenth after the warm-up.

    None where nobody can tell: for fewer than `MIN_READINGS`, all of which would be warm-up.
    """
    if len(readings) < MIN_READINGS:
        return None
    settled = readings[int(len(readings) * WARM_UP_SHARE) :]
    tenth = len(settled) // 10
    return round(median(settled[-tenth:]) - median(settled[:tenth]), 2)


def _host_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(llm: LLM, seed: int, goes_on: Callable[[int, float], bool]) -> Run:
    """Traffic while `goes_on(steps, seconds)`, then steps until nothing is left."""
    engine, rows = llm.engine, llm.config.limits.max_num_seqs
    traffic = Traffic(seed, llm.info.vocab_size, llm.info.max_model_len, rows)
    done = Run(seed, llm.config.model_dump(mode="json"))
    live: dict[str, None] = {}
    num_requests = num_aborts = 0
    started, arriving = perf_counter(), True
    while arriving or engine.has_unfinished():
        arriving = arriving and goes_on(done.steps, perf_counter() - started)
        if arriving:
            arrivals, abort = traffic.next_step(list(live))
            for prompt, params in arrivals:
                engine.add_request(str(num_requests), prompt, params)
                live[str(num_requests)] = None
                num_requests += 1
            if abort:
                engine.abort(abort)
                num_aborts += 1
        for delta in engine.step():
            del live[delta.request_id]
            done.finish(int(delta.request_id), delta.finish_reason, delta.new_token_ids)
        done.steps += arriving
        if perf_counter() - started > len(done.memory) * SAMPLE_SECONDS:
            done.read_memory(perf_counter() - started)
    done.counts = {
        "seconds": round(perf_counter() - started, 1),
        "requests": num_requests,
        "aborts": num_aborts,
        "output_tokens": llm.stats.output_tokens,
        "preemptions": llm.stats.preemptions,
        "prefix_hit_tokens": llm.stats.prefix_hit_tokens,
        "num_blocks": llm.info.num_blocks,
        "free_blocks": llm.stats.free_blocks,
    }
    return done


def problems(result: dict[str, Any]) -> list[str]:
    """What a run must not show."""
    found = []
    if result["free_blocks"] != result["num_blocks"]:
        found.append(f"{result['num_blocks'] - result['free_blocks']} blocks did not come back")
    if not result["preemptions"]:
        found.append("no request was preempted, so preemption was not tested; use fewer --blocks")
    for where in ("host", "device"):
        grown = result[f"{where}_growth_mib"]
        if grown is not None and grown > MAX_GROWTH_MIB:
            found.append(f"memory of the {where} grew by {grown} MiB")
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two runs of one schedule differ, over the steps that both made."""
    if (one["seed"], one["settings"]) != (other["seed"], other["settings"]):
        return ["these are not runs of the same schedule with the same settings"]
    steps = min(one["steps"], other["steps"])
    same_length = one["steps"] == other["steps"]
    ours, theirs = (
        {number: (step, digest) for step, number, digest in run["finished"]
         if same_length or step < steps}
        for run in (one, other)
    )  # fmt: skip
    differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if not ours:
        return [f"no request finished in the {steps} steps that both runs made"]
    return [
        f"request {n}: (step, digest) {ours.get(n)} and {theirs.get(n)}" for n in differing[:10]
    ] + ([f"{len(differing)} of {len(ours)} requests differ"] if differing else [])


def open_engine(arguments: argparse.Namespace) -> LLM:
    """An engine with a cache for a sequence of the greatest length and a twelfth of the rows."""
    max_len, rows, block_size = (
        arguments.max_model_len, arguments.max_num_seqs, arguments.block_size
    )  # fmt: skip
    num_blocks = arguments.blocks or (max_len + rows * max_len // 12) // block_size
    return LLM(
        arguments.model,
        load_format=load_format(arguments.model),
        device=arguments.device,
        attention=arguments.attention,
        debug=arguments.debug,
        limits={"max_model_len": max_len, "max_num_seqs": rows, "max_num_batched_tokens": 512},
        cache={"block_size": block_size, "num_blocks": num_blocks},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--steps", type=int, help="this many steps, in place of --minutes")
    parser.add_argument("--replay", action="store_true", help="run it again and compare")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two results")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--blocks", type=int, help="blocks of the cache (default: too few)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--debug", action="store_true", help="check every invariant at every step")
    arguments = parser.parse_args()
    if arguments.compare:
        one, other = (json.loads(file.read_text()) for file in arguments.compare)
        return report(one, differences(one, other))
    seconds, steps = arguments.minutes * 60, arguments.steps
    goes_on = (lambda k, s: s < seconds) if steps is None else (lambda k, s: k < steps)
    with open_engine(arguments) as llm:
        result = run(llm, arguments.seed, goes_on).to_json()
    found = problems(result)
    if arguments.replay:
        with open_engine(arguments) as llm:
            again = run(llm, arguments.seed, lambda k, s: k < result["steps"]).to_json()
        found += problems(again) + differences(result, again)
        result["replayed_requests"] = len(again["finished"])
    result["problems"] = found
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")
    return report(result, found)


def report(result: dict[str, Any], found: Sequence[str]) -> int:
    """Print the numbers and what is wrong; the exit status."""
    large = ("settings", "environment", "memory", "finished", "problems")
    print({name: value for name, value in result.items() if name not in large})
    print("\n".join(found) or "all is well")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
