"""What the host spends on a steady decode step of a real worker, at batch 256.

    python benchmarks/steady_step.py [--block-size 256] [--attention triton] [--windows 3]

Qwen3-0.6B's shapes with random weights. `benchmarks/host_step.py` measures the same without a GPU
and without the worker.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.bench.workloads import fixed_workload

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
STEPS = 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--windows", type=int, default=3)
    arguments = parser.parse_args()
    limits = {"max_model_len": 4096, "max_num_seqs": arguments.batch}
    with LLM(
        str(CONFIG), load_format="dummy", attention=arguments.attention, limits=limits,
        cache={"block_size": arguments.block_size},
    ) as llm:  # fmt: skip
        engine = llm._engine
        workload = fixed_workload(arguments.batch, 500, (arguments.windows + 1) * STEPS)
        for index, prompt in enumerate(workload.prompts):
            params = SamplingParams(
                temperature=0.6, max_tokens=workload.output_lens[index], ignore_eos=True
            )
            engine.add_request(str(index), prompt, params)
        for _ in range(40):
            engine.step()
        for window in range(arguments.windows):
            started, spent = perf_counter(), []
            for _ in range(STEPS):
                before = engine.stats.host_seconds
                engine.step()
                spent.append((engine.stats.host_seconds - before) * 1e6)
            milliseconds = (perf_counter() - started) / STEPS * 1e3
            print(
                f"window {window}: step {milliseconds:.2f} ms, host mean {mean(spent):.1f} µs, "
                f"median {median(spent):.1f} µs, max {max(spent):.0f} µs"
            )


if __name__ == "__main__":
    main()
