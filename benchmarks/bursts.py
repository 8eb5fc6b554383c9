"""Milliseconds until each of several prompts that come at once has its first token.

    python benchmarks/bursts.py [--model FOLDER] [--bursts 8x30 1x4000 ...] [--out FILE]

The engine is idle before; nothing is cached. Median of calls of `generate` for one token each, host
work included: what a burst of requests to a server waits for. A model folder without weights gets
random ones. With `--eager-prompts` no step with prompts is captured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.workloads import load_format
from nanovllm_core import LLM, SamplingParams

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
BURSTS = ((1, 30), (8, 30), (20, 30), (100, 30), (1, 1000), (8, 500), (40, 100), (1, 4000))
"""Prompts, and tokens of each."""
WARM_UP, RUNS = 3, 30


def parse_burst(text: str) -> tuple[int, int]:
    """Of "8x30": 8 prompts of 30 tokens."""
    num_prompts, length = map(int, text.split("x"))
    if min(num_prompts, length) < 1:
        raise ValueError(text)
    return num_prompts, length


def measure(llm: LLM, num_prompts: int, length: int, salts: Iterator[int], runs: int) -> float:
    """The median, in milliseconds."""
    params = SamplingParams(temperature=0.8, max_tokens=1, ignore_eos=True)
    vocab_size = llm.info.vocab_size
    seconds = []
    for _ in range(WARM_UP + runs):
        # Of differing tokens, which spread over the experts of a mixture.
        starts = [next(salts) for _ in range(num_prompts)]
        prompts = [[(start + 31 * i) % vocab_size for i in range(length)] for start in starts]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--eager-prompts", action="store_true", help="capture decode steps alone")
    parser.add_argument("--bursts", type=parse_burst, nargs="+", default=BURSTS, metavar="8x30")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each burst")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        load_format=load_format(arguments.model),
        device=arguments.device,
        attention=arguments.attention,
        cache={"prefix_caching": False},
        cuda_graphs={"prompt_sizes": [] if arguments.eager_prompts else None},
    ) as llm:
        salts, rows = count(1), list[dict[str, Any]]()
        for num_prompts, length in arguments.bursts:
            ms = measure(llm, num_prompts, length, salts, arguments.runs)
            rows.append({"prompts": num_prompts, "length": length, "ms": round(ms, 2)})
            print(f"{num_prompts:4d} x {length:6d}: {ms:7.2f} ms", flush=True)
        result = {
            "bursts": rows,
            "runs": arguments.runs,
            "config": llm.config.model_dump(mode="json"),
            "environment": describe_environment(),
        }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
