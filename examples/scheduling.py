"""Long prompts arrive before short ones: who is served when, under FCFS and under SJF.

    python examples/scheduling.py [--model demo]

Needs the sjf scheduler: pip install -e plugins/scheduler_sjf. A wait is counted in engine steps,
from the arrival of a request to the step that starts to compute its prompt.
"""

from __future__ import annotations

import argparse
from statistics import mean

from rich.console import Console
from rich.table import Table

from nanovllm_core import LLM, RequestOutput, SamplingParams

LONG, SHORT = 600, 12


def serve(model: str, scheduler: str, prompts: list[list[int]]) -> list[RequestOutput]:
    """Run all prompts, one at a time and 128 tokens a step, so that there is a queue."""
    with LLM(
        model,
        scheduler={"name": scheduler},
        limits={"max_num_seqs": 1, "max_num_batched_tokens": 128},
        cache={"prefix_caching": False},
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        return llm.generate(prompts, params, use_tqdm=False)


def waits(outputs: list[RequestOutput]) -> list[int]:
    """How many steps each request waited."""
    return [output.wait_steps or 0 for output in outputs]


def order_of_service(names: list[str], outputs: list[RequestOutput]) -> str:
    """The names of the requests as they were served."""
    ranked = sorted(zip(waits(outputs), range(len(names)), names, strict=True))
    return " ".join(name for _, _, name in ranked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a checkpoint (default: the embedded one)")
    parser.add_argument("--long", type=int, default=3, help=f"prompts of {LONG} tokens, first")
    parser.add_argument("--short", type=int, default=9, help=f"prompts of {SHORT} tokens, then")
    args = parser.parse_args()
    lengths = [LONG] * args.long + [SHORT] * args.short
    names = [f"L{i}" for i in range(args.long)] + [f"s{i}" for i in range(args.short)]
    prompts = [[(i + j) % 100 + 5 for j in range(length)] for i, length in enumerate(lengths)]

    table = Table(
        title=f"{args.long} long prompts (L), then {args.short} short ones (s); waits in steps"
    )
    table.add_column("scheduler")
    table.add_column("order of service")
    for column in ("mean wait", "worst", "mean of short", "mean of long"):
        table.add_column(column, justify="right")
    for scheduler in ("fcfs", "sjf"):
        outputs = serve(args.model, scheduler, prompts)
        steps = waits(outputs)
        table.add_row(
            scheduler,
            order_of_service(names, outputs),
            f"{mean(steps):.1f}",
            f"{max(steps)}",
            f"{mean(steps[args.long :]):.1f}",
            f"{mean(steps[: args.long]):.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
