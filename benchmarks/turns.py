"""Milliseconds until the next turn of a conversation has its first token, its context cached.

    python benchmarks/turns.py [--model FOLDER] [--longest 32000] [--whole] [--out FILE]

The engine is idle before. Median of RUNS calls of `generate` for one token each, host work
included; each has other new tokens behind the same context, which the prefix cache holds. A cache
holds whole blocks, so up to a block of the context is computed again. A model folder without
weights gets random ones. With `--whole`, attention `triton` splits no context.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.workloads import load_format
from nanovllm_core import LLM, SamplingParams

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
CONTEXTS = (0, 2000, 8000, 32_000)
TURNS = (16, 100, 500)
WARM_UP, RUNS = 3, 20
PARAMS = SamplingParams(temperature=0.8, max_tokens=1, ignore_eos=True)


def tokens(start: int, length: int, vocab_size: int) -> list[int]:
    """Differing ones, which spread over the experts of a mixture."""
    return [(start + 31 * i) % vocab_size for i in range(length)]


def measure(llm: LLM, context: list[int], length: int, salts: count[int]) -> float:
    """The median, in milliseconds."""
    times = []
    for number in range(WARM_UP + RUNS):
        prompt = [*context, *tokens(next(salts), length, llm.info.vocab_size)]
        began = time.perf_counter()
        [answer] = llm.generate([prompt], PARAMS, use_tqdm=False)
        times.append(time.perf_counter() - began)
        computed = len(context) - answer.num_cached_tokens
        if number >= WARM_UP and computed >= llm.info.block_size:
            raise SystemExit(f"{computed} tokens of {len(context)} were not cached: enlarge cache")
    return 1e3 * median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--whole", action="store_true", help="split no context")
    parser.add_argument("--longest", type=int, default=CONTEXTS[-1], help="leave out longer ones")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    options = {"chunk_size": 256} if arguments.whole else {}
    contexts = [context for context in CONTEXTS if context <= arguments.longest]
    rows, salts = list[dict[str, Any]](), count(1)
    with LLM(
        arguments.model,
        load_format=load_format(arguments.model),
        device=arguments.device,
        attention={"backend": arguments.attention, "options": options},
        max_model_len=contexts[-1] + TURNS[-1] + 1,
        max_num_seqs=64,
    ) as llm:
        for number, length in enumerate(contexts):
            context = tokens(10_007 * number, length, llm.info.vocab_size)
            for turn in TURNS:
                ms = measure(llm, context, turn, salts)
                rows.append({"context": length, "turn": turn, "ms": round(ms, 2)})
                print(f"{turn:4d} behind {length:6d}: {ms:7.2f} ms", flush=True)
        result = {
            "turns": rows,
            "runs": RUNS,
            "config": llm.config.model_dump(mode="json"),
            "environment": describe_environment(),
        }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
