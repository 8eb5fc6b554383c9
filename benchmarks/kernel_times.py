"""Where the time of a decode step and of a long prompt goes: the kernels, by torch's profiler.

    python benchmarks/kernel_times.py [--model FOLDER] [--rows 1 16 64] [--prompt 8000] [--out FILE]

Kernels overlap, for one that waits for the one before it may begin early, and its duration counts
the wait. So each has as its own the time by which it ends later than all before it: these times and
the gaps between kernels add up to the step. A model folder without weights gets random ones. Needs
a CUDA GPU; run nothing beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm_bench.record import describe_engine, write_record
from nanovllm_bench.throughput import timed_generate
from nanovllm_bench.workloads import fixed_workload, load_format
from nanovllm_core import LLM

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
CONTEXT, STEPS = 512, 60
"""Tokens of the prompts before the decode steps, and steps that count."""
TEMPERATURE = 0.6
LAST_KERNEL = "_finish_step_kernel"
"""Each step ends with it, but for copies to the host."""
SHOWN = 14
"""Kernels that are printed, those with most time of their own."""


class Kernel(NamedTuple):
    """One run of a kernel or a copy, in microseconds of the device's clock."""

    start: float
    end: float
    name: str


@dataclass(slots=True)
class Share:
    """What all runs of one kernel take: in total, and of their own; in microseconds."""

    runs: int = 0
    lasted: float = 0.0
    own: float = 0.0


def record_kernels(call: Callable[[], object]) -> list[Kernel]:
    """What the call ran on the device, in the order of its starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    )


def last_steps(kernels: Sequence[Kernel], num_steps: int) -> list[Kernel]:
    """The kernels of so many last steps, without what follows them.

    ValueError where there are fewer: the steps are told apart by the kernel that ends each.
    """
    ends = [kernel.end for kernel in kernels if LAST_KERNEL in kernel.name]
    if len(ends) <= num_steps:
        raise ValueError(f"{len(ends)} steps ran, {num_steps} and one before them are needed")
    first, last = ends[-num_steps - 1], ends[-1]
    return [kernel for kernel in kernels if first < kernel.end <= last]


def share_out(kernels: Iterable[Kernel]) -> tuple[dict[str, Share], float]:
    """Each kernel's share, the largest first, and the microseconds in which none ran."""
    shares: dict[str, Share] = {}
    idle, last = 0.0, None
    for start, end, name in sorted(kernels):
        before = start if last is None else last
        share = shares.setdefault(name, Share())
        share.runs += 1
        share.lasted += end - start
        share.own += max(end - max(start, before), 0.0)
        idle += max(start - before, 0.0)
        last = max(end, before)
    return dict(sorted(shares.items(), key=lambda item: -item[1].own)), idle


def describe(kernels: Sequence[Kernel], num_steps: int) -> dict[str, Any]:
    """Microseconds of one step of these: in all, without a kernel, and of each."""
    shares, idle = share_out(kernels)
    span = idle + sum(share.own for share in shares.values())
    return {
        "us": round(span / num_steps, 1),
        "idle_us": round(idle / num_steps, 1),
        "kernels": {
            name: {key: round(value / num_steps, 2) for key, value in asdict(share).items()}
            for name, share in shares.items()
        },
    }


def show(title: str, found: dict[str, Any]) -> None:
    print(f"{title}: {found['us']:,.1f} µs, {found['idle_us']:,.1f} of them idle")
    for name, share in list(found["kernels"].items())[:SHOWN]:
        own, runs = share["own"], share["runs"]
        each = f"{own / runs:8.2f} each, lasts {share['lasted'] / runs:8.2f}"
        print(f"  {own:10.1f} µs  x {runs:5.1f}  {each}  {name[:80]}", flush=True)


def measure(llm: LLM, rows: Sequence[int], prompt: int) -> dict[str, Any]:
    """A decode step of each number of rows, and a prompt; each runs once before it counts."""

    def kernels_of(num_seqs: int, input_len: int, output_len: int) -> list[Kernel]:
        workload = fixed_workload(num_seqs, input_len, output_len).within(llm.info.vocab_size)
        timed_generate(llm, workload, TEMPERATURE)
        return record_kernels(lambda: timed_generate(llm, workload, TEMPERATURE))

    found: dict[str, Any] = {"steps": {}}
    for num_rows in rows:
        kernels = last_steps(kernels_of(num_rows, CONTEXT, STEPS + 20), STEPS)
        found["steps"][num_rows] = step = describe(kernels, STEPS)
        show(f"a step of {num_rows} rows", step)
    if prompt:
        found["prompt"] = describe(kernels_of(1, prompt, 1), 1)
        show(f"a prompt of {prompt:,} tokens", found["prompt"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16, 64))
    parser.add_argument("--prompt", type=int, default=8000, help="its tokens; 0 for no prompt")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU: torch's profiler sees no kernels elsewhere")
    with LLM(
        arguments.model,
        load_format=load_format(arguments.model),
        attention=arguments.attention,
        limits={"max_model_len": max(arguments.prompt, CONTEXT + STEPS + 20) + 16},
    ) as llm:
        found = measure(llm, arguments.rows, arguments.prompt)
        engine = describe_engine(llm)
    if arguments.out:
        write_record(arguments.out, {**found, **engine})


if __name__ == "__main__":
    main()
