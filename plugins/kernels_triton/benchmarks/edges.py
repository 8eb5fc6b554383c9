"""The cost of an edge between two products of one row: between kernels, and inside one kernel.

    python plugins/kernels_triton/benchmarks/edges.py [--sizes 512 1024 2048] [--json edges.json]

A chain of products y = W x, each of which needs all of the one before. A program has its rows of W
before x comes, in registers, and no weight is streamed. So a link of the chain is one edge: y is
stored, others learn of it, load it, multiply and add up. The ways:

- `launches`: a kernel for each product, with dependent launch, in a CUDA graph;
- `counter`: one kernel, whose programs raise a counter and poll it;
- `tags`: one kernel, whose programs poll x itself, of which each word carries its round.

A persistent decode layer pays where an edge costs it 1.3 us or less. Waits are bounded: a kernel
that sees no progress ends, and its wrong result is noticed. Half a minute on one GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.kernels import launch_options, supports_dependent_launch

ROUNDS = 512
CHECKED_ROUNDS = 5
"""Roundings add up, so few are compared with torch."""
TRIES = tl.constexpr(1 << 16)
"""Polls without progress, some 50 ms, after which a program gives up."""
TOLERANCE = 0.02


@triton.jit
def product(weight, x):
    """Rows [N, K] times x [K], rounded."""
    y = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    return y.to(tl.bfloat16)


@triton.jit
def load_rows(weight_ptr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """This program's rows of the weight, their numbers, and those of its columns."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    mask = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
    places = rows[:, None] * SIZE + columns[None, :]
    return tl.load(weight_ptr + places, mask=mask, other=0.0), rows, columns


@triton.jit
def launched_kernel(
    x_ptr, weight_ptr, y_ptr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One product, which holds its weights before it waits."""
    if DEPENDENT:
        gdc_launch_dependents()
    weight, rows, columns = load_rows(weight_ptr, SIZE, BLOCK_N, BLOCK_K)
    tl.debug_barrier()
    if DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
    tl.store(y_ptr + rows, product(weight, x), mask=rows < SIZE)


@triton.jit(do_not_specialize=["rounds"])
def counter_kernel(
    x_ptr, weight_ptr, counter_ptr, rounds,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All products: `x_ptr` [2, SIZE] holds x and y in turn; the counter begins at zero."""
    weight, rows, columns = load_rows(weight_ptr, SIZE, BLOCK_N, BLOCK_K)
    for number in range(rounds):
        here = x_ptr + number % 2 * SIZE
        x = tl.load(here + columns, mask=columns < SIZE, other=0.0, cache_modifier=".cg")
        there = x_ptr + (number + 1) % 2 * SIZE
        tl.store(there + rows, product(weight, x), mask=rows < SIZE)
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")
        tries = 0
        count = tl.atomic_add(counter_ptr, 0, sem="acquire")
        while (count < (number + 1) * tl.num_programs(0)) & (tries < TRIES):
            count = tl.atomic_add(counter_ptr, 0, sem="acquire")
            tries += 1


@triton.jit(do_not_specialize=["rounds"])
def tags_kernel(
    words_ptr, weight_ptr, rounds,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All products: `words_ptr` [2, SIZE] int32 holds x and y in turn, above the round of each.

    Two places are enough: a program is in a round only after all have read the words of the one
    before.
    """
    weight, rows, columns = load_rows(weight_ptr, SIZE, BLOCK_N, BLOCK_K)
    for number in range(rounds):
        here = words_ptr + number % 2 * SIZE + columns
        words = tl.load(here, mask=columns < SIZE, other=number, volatile=True)
        tries = 0
        while (tl.max((words & 0xFFFF) ^ number, axis=0) != 0) & (tries < TRIES):
            words = tl.load(here, mask=columns < SIZE, other=number, volatile=True)
            tries += 1
        x = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        x = tl.where(columns < SIZE, x, 0.0)
        y = product(weight, x).to(tl.int16, bitcast=True).to(tl.int32)
        there = words_ptr + (number + 1) % 2 * SIZE + rows
        tl.store(there, (y << 16) | (number + 1), mask=rows < SIZE)


class Chain:
    """The chain of one size, with as many programs as the GPU has multiprocessors at most."""

    def __init__(self, size: int, num_warps: int) -> None:
        device = torch.device("cuda")
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        block_n = triton.next_power_of_2(triton.cdiv(size, processors))
        self.grid = (triton.cdiv(size, block_n),)
        self.constants = {
            "SIZE": size,
            "BLOCK_N": block_n,
            "BLOCK_K": triton.next_power_of_2(size),
            "num_warps": num_warps,
        }
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        # Rows of unit length keep the numbers in their range.
        self.weight = torch.nn.functional.normalize(torch.randn(size, size, **options), dim=1)
        self.x: Tensor = torch.randn(size, **options)
        self.places: Tensor = torch.zeros(2, size, **options)
        self.words = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.options = launch_options(supports_dependent_launch(device))

    def expected(self) -> Tensor:
        x = self.x
        for _ in range(CHECKED_ROUNDS):
            x = torch.mv(self.weight, x)
        return x

    def launches(self, rounds: int) -> Tensor:
        self.places[0] = self.x
        for number in range(rounds):
            here, there = self.places[number % 2], self.places[(number + 1) % 2]
            launched_kernel[self.grid](here, self.weight, there, **self.constants, **self.options)
        return self.places[rounds % 2]

    def counted(self, rounds: int) -> Tensor:
        self.places[0] = self.x
        self.counter.zero_()
        counter_kernel[self.grid](self.places, self.weight, self.counter, rounds, **self.constants)
        return self.places[rounds % 2]

    def tagged(self, rounds: int) -> Tensor:
        self.words[0] = self.x.view(torch.int16).int() << 16
        self.words[1] = -1
        tags_kernel[self.grid](self.words, self.weight, rounds, **self.constants)
        return (self.words[rounds % 2] >> 16).to(torch.int16).view(torch.bfloat16)


def microseconds(run: Callable[[int], Tensor]) -> float:
    """Of one round: those of many less those of few, in graphs, so that launches do not count."""
    times: list[float] = []
    for rounds in (ROUNDS // 2, ROUNDS):
        run(rounds)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(rounds)
        median: float = triton.testing.do_bench(graph.replay, rep=200, return_mode="median")
        times.append(median)
    return (times[1] - times[0]) * 1e3 / (ROUNDS - ROUNDS // 2)


def measure(size: int, num_warps: int) -> dict[str, float]:
    chain = Chain(size, num_warps)
    ways = {"launches": chain.launches, "counter": chain.counted, "tags": chain.tagged}
    expected = chain.expected().float()
    found = {}
    for name, run in ways.items():
        error = (run(CHECKED_ROUNDS).float() - expected).norm() / expected.norm()
        if not error < TOLERANCE:
            raise SystemExit(f"{name} of {size}: the result is off by {error:.3f}")
        found[name] = round(microseconds(partial(run)), 3)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(argv)
    rows = []
    for size in arguments.sizes:
        for num_warps in arguments.warps:
            found = measure(size, num_warps)
            rows.append({"size": size, "num_warps": num_warps, "us_an_edge": found})
            edges = "  ".join(f"{name} {time:5.2f} us" for name, time in found.items())
            print(f"{size:5} numbers, {num_warps} warps: {edges}", flush=True)
    if arguments.json is not None:
        record = {"device": torch.cuda.get_device_name(), "rounds": ROUNDS, "edges": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
