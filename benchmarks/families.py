"""Models of several families: decode steps of few and many requests, and a long prompt.

    pip install examples/plugins/model_llama examples/plugins/model_qwen2 \
        examples/plugins/model_gemma
    python benchmarks/families.py [MODEL...] [--out FILE]

Each model has the shapes of the published one and random weights, and a process of its own. A step
is the difference of long and short answers to prompts of 512 tokens, with all that the engine does:
its steps compute all prompts before the short answers end. The prompt is alone, and its time is
that to the first token. Backends are those of `auto`. Shares are of the floor that
nanovllm_bench.roofline computes from this machine's rates. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from nanovllm_bench.apart import run_apart
from nanovllm_bench.environment import describe_environment
from nanovllm_bench.record import describe_engine, write_record
from nanovllm_bench.roofline import decode_step_seconds, generate_floor
from nanovllm_bench.throughput import Gauge, timed_generate
from nanovllm_bench.workloads import fixed_workload
from nanovllm_core import LLM

MODELS = json.loads((Path(__file__).parent / "configs" / "families.json").read_text())
"""Of each model's config.json what sets its times: shapes and windows. The rest is alike in all."""
PROMPT, SHORT, LONG = 512, 16, 176
"""Tokens of the prompts, and of their short and long answers."""
LONG_PROMPT = 8_000
ROWS = (1, 4, 16, 64, 128)
TIMES, TEMPERATURE = 3, 0.6


def run_seconds(llm: LLM, num_seqs: int, input_len: int, output_len: int) -> float:
    """Seconds of the quickest run of so many requests."""
    workload = fixed_workload(num_seqs, input_len, output_len).within(llm.info.vocab_size)
    return min(timed_generate(llm, workload, TEMPERATURE) for _ in range(TIMES))


def step_seconds(llm: LLM, num_rows: int) -> float:
    """Seconds of a decode step of `num_rows` requests."""
    long, short = (run_seconds(llm, num_rows, PROMPT, length) for length in (LONG, SHORT))
    return (long - short) / (LONG - SHORT)


def measure(name: str) -> dict[str, Any]:
    """Measure one model in this process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        with LLM(folder, load_format="dummy", limits={"max_model_len": LONG_PROMPT + 96}) as llm:
            steps = {rows: step_seconds(llm, rows) for rows in ROWS}
            prompt = run_seconds(llm, 1, LONG_PROMPT, 1)
            # Behind the runs: steps that follow the measurement of the device take longer.
            gauge, engine = Gauge.of(llm), describe_engine(llm)
    costs, rates = gauge.costs, gauge.rates
    context = PROMPT + (SHORT + LONG) / 2
    floors = {rows: decode_step_seconds(costs, rows, context, rates) for rows in ROWS}
    prompt_floor = generate_floor(costs, [(LONG_PROMPT, 1)], 1, rates).seconds
    return {
        "attention": engine["attention"],
        "kernels": engine["kernels"],
        "billions_of_parameters": round(costs.num_parameters / 1e9, 2),
        "copy_bytes_per_s": rates.copy_bytes_per_s,
        "matmul_flops_per_s": rates.matmul_flops_per_s,
        "step_ms": {rows: round(1e3 * seconds, 3) for rows, seconds in steps.items()},
        "step_share": {rows: round(floors[rows] / steps[rows], 3) for rows in ROWS},
        "prompt_ms": round(1e3 * prompt, 2),
        "prompt_share": round(prompt_floor / prompt, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    found: dict[str, Any] = {}
    environment = run_apart(describe_environment)
    record = {"environment": environment, "prompt": PROMPT, "long_prompt": LONG_PROMPT}
    for name in arguments.models or MODELS:
        found[name] = one = run_apart(measure, name)
        steps = "  ".join(
            f"{rows:>3} {ms:7.3f} ms {100 * one['step_share'][rows]:3.0f} %"
            for rows, ms in one["step_ms"].items()
        )
        prompt = f"{one['prompt_ms']:7.1f} ms {100 * one['prompt_share']:3.0f} %"
        print(f"{name:16s} {steps}  prompt {prompt}", flush=True)
        if arguments.out is not None:
            write_record(arguments.out, record | {"models": found})


if __name__ == "__main__":
    main()
