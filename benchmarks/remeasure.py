"""Measure committed throughputs again and compare: python benchmarks/remeasure.py FILE...

Each file names its model, configuration and workload; all of it is run as it was, in a process of
its own. Exits with 1 where one is slower than its file by more than a twentieth, more than runs
differ on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nanovllm_bench.apart import run_apart
from nanovllm_bench.experts import with_touched_experts
from nanovllm_bench.record import write_record
from nanovllm_bench.throughput import measure_throughput
from nanovllm_bench.workloads import recorded_workload
from nanovllm_core import LLM, EngineConfig
from nanovllm_core.errors import ConfigError, NanoVLLMError

TOLERANCE = 0.05


def measure_again(record: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """The same configuration and workload, now; ConfigError where they cannot be made again."""
    if record.get("benchmark") != "throughput":
        raise ConfigError(f"it is a record of {record.get('benchmark')!r}, not of 'throughput'")
    try:
        config = EngineConfig.model_validate_json(json.dumps(record["config"]))
    except ValidationError as error:
        raise ConfigError(f"its configuration is of another version: {error}") from None
    workload = recorded_workload(record)
    with LLM.from_config(config) as llm:
        now = measure_throughput(llm, workload, temperature=record["temperature"], runs=runs)
    return with_touched_experts(now, config, workload)


def compare(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Print both; False where it is slower than tolerated."""
    if now["attention"] != then["attention"]:
        print(f"{name:28s} ran {now['attention']}, the file says {then['attention']}")
    ratio = now["tokens_per_second"] / then["tokens_per_second"]
    print(
        f"{name:28s} {then['workload']:16s} {then['tokens_per_second']:>10,.0f} -> "
        f"{now['tokens_per_second']:>10,.0f} tok/s {ratio - 1:+.1%}, "
        f"{100 * now['roofline']['share']:.0f} % of the roofline; {now['attention']}",
        flush=True,
    )
    return bool(ratio >= 1 - TOLERANCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=2, help="counted runs of each")
    parser.add_argument("--out", type=Path, help="folder for the new result files")
    arguments = parser.parse_args()
    slower, failed = [], []
    for file in arguments.files:
        then = json.loads(file.read_text(encoding="utf-8"))
        try:
            now = run_apart(measure_again, then, arguments.runs)
        except NanoVLLMError as error:
            print(f"{file.stem:28s} cannot run here: {error}", flush=True)
            failed.append(file.stem)
            continue
        if arguments.out is not None:
            write_record(arguments.out / file.name, now)
        if not compare(file.stem, then, now):
            slower.append(file.stem)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    if slower:
        sys.exit(f"slower than committed by more than {TOLERANCE:.0%}: {', '.join(slower)}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
