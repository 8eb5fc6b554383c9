"""A batch by the scheduler `fcfs` and by `lpt`: tokens per second, and how long its requests wait.

    python benchmarks/batches.py FILE... [--tokens 384] [--out FOLDER]

Each FILE is a throughput record, as `nanovllm bench throughput` writes it: its model, configuration
and workload are run as they were, and again with `lpt` and steps of `--tokens`. Both run on this
machine, one after the other, each in a process of its own. The first run of each takes the times of
its requests and is not counted; the others take the time of the whole batch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from nanovllm_bench.apart import run_apart
from nanovllm_bench.record import write_record
from nanovllm_bench.throughput import Gauge, describe_runs, measure_runs, sampling_params
from nanovllm_bench.workloads import Workload, recorded_workload
from nanovllm_core import LLM, EngineConfig


def time_requests(llm: LLM, workload: Workload, temperature: float) -> dict[str, float]:
    """Seconds from the beginning to the admission and to the end of a request, in the mean.

    The admission is that of the step in which the prompt begins, to within the steps in flight.
    """
    engine = llm.engine
    params = sampling_params(workload, temperature)
    began = perf_counter()
    for index, (prompt, one) in enumerate(zip(workload.prompts, params, strict=True)):
        engine.add_request(f"{index}", prompt, one)
    steps: list[float] = []
    ends, waits = [], []
    while engine.has_unfinished():
        deltas = engine.step()
        steps.append(perf_counter() - began)
        ends += [steps[-1] for delta in deltas if delta.finish_reason]
        waits += [delta.wait_steps or 0 for delta in deltas if delta.finish_reason]
    admissions = [steps[min(wait, len(steps)) - 1] if wait else 0.0 for wait in waits]
    return {
        "mean_wait_seconds": round(mean(admissions), 4),
        "mean_end_seconds": round(mean(ends), 4),
    }


def measure(config: EngineConfig, record: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """The record's workload on an engine of `config`."""
    workload, temperature = recorded_workload(record), record["temperature"]
    with LLM.from_config(config) as llm:
        workload = workload.within(llm.info.vocab_size)
        gauge = Gauge.of(llm)
        times = time_requests(llm, workload, temperature)
        measured = measure_runs(llm, workload, gauge, temperature=temperature, runs=runs)
        return {
            **describe_runs(llm, workload, gauge, measured, temperature),
            "preemptions": measured.after.preemptions - measured.before.preemptions,
            **times,
        }


def configurations(record: Mapping[str, Any], tokens: int) -> dict[str, EngineConfig]:
    """The record's own with `fcfs`, and with `lpt` and steps of so many tokens."""
    settings = record["config"]
    limits = {**settings["limits"], "max_num_batched_tokens": tokens}
    changes = {
        "fcfs": {"scheduler": {"name": "fcfs"}},
        "lpt": {"scheduler": {"name": "lpt"}, "limits": limits},
    }
    return {
        name: EngineConfig.model_validate_json(json.dumps({**settings, **change}))
        for name, change in changes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=384, help="of a step of lpt (default 384)")
    parser.add_argument("--runs", type=int, default=2, help="counted runs of each")
    parser.add_argument("--out", type=Path, help="folder for the new result files")
    arguments = parser.parse_args()
    for file in arguments.files:
        record = json.loads(file.read_text(encoding="utf-8"))
        for name, config in configurations(record, arguments.tokens).items():
            now = run_apart(measure, config, record, arguments.runs)
            print(
                f"{file.stem:28s} {name:5s} {now['tokens_per_second']:>10,.0f} tok/s, "
                f"wait {now['mean_wait_seconds']:.2f} s, end {now['mean_end_seconds']:.2f} s in "
                f"the mean, {now['preemptions']} preemptions, {now['steps']} steps",
                flush=True,
            )
            if arguments.out is not None:
                names = Path(config.model).name, now["workload"], name
                stem = re.sub(r"\W+", "_", "_".join(("batch", *names)))
                write_record(arguments.out / f"{stem}.json", now)


if __name__ == "__main__":
    main()
