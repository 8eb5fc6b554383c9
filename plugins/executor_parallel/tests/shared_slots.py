"""All-reduces over slots in Triton's interpreter; each rank is a process over shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from triton.runtime import interpreter

from nanovllm_executor_parallel.one_shot import OneShotAllReduce
from nanovllm_executor_parallel.slots import SENTINEL, Bound, SlotAllReduce
from nanovllm_executor_parallel.two_shot import TwoShotAllReduce

CAPACITY = 8192
"""Bytes: sixteen blocks."""
MAX_PROGRAMS = 3
"""Of some parts a program has several blocks, and not all programs have as many."""
MANY = 10**6
"""A bound in polls, for the interpreter has no clock: longer than a test."""

KINDS = (OneShotAllReduce, TwoShotAllReduce)
Kind: TypeAlias = type[SlotAllReduce]
Part: TypeAlias = Callable[[Sequence[SlotAllReduce], int], Sequence[Tensor]]
"""(the all-reduces of a rank, the rank) -> results."""


def shared_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that forked processes share, at the same address."""
    num_bytes = prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(*shape)


class SharedSlots:
    """The slots of all ranks in memory that forked processes share, at the same addresses."""

    def __init__(self, kind: Kind, size: int, capacity: int = CAPACITY) -> None:
        shape = (size, *kind.slots_shape(size, capacity))
        self.kind = kind
        self.slots = shared_memory(shape, torch.int32).fill_(SENTINEL)

    def reduce_of(self, rank: int, bound: Bound) -> SlotAllReduce:
        """The all-reduce of a rank."""
        peers = torch.tensor([one.data_ptr() for one in self.slots])
        return self.kind(rank, self.slots[rank], peers, bound, MAX_PROGRAMS)


def bound_of(polls: int) -> Bound:
    """A bound of so many polls."""
    return Bound(polls * 1e-9, torch.device("cpu"))


def run_ranks(
    kinds: Sequence[Kind], size: int, part: Part, polls: int = MANY
) -> list[list[Tensor]]:
    """What `part` returns on each rank, all of them at once."""
    shared = [SharedSlots(kind, size) for kind in kinds]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # the pools of threads are not forked
        bound = bound_of(polls)
        results = part([one.reduce_of(rank, bound) for one in shared], rank)
        pipes[rank][1].send([(one.dtype, one.view(torch.uint8).numpy()) for one in results])
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        received = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [[torch.from_numpy(x).view(dtype) for dtype, x in results] for results in received]


PROGRAMS = 3
"""Of a rank in `run_programs`."""


def run_programs(
    kind: Kind, size: int, num_calls: int, part: Callable[[SlotAllReduce, int, int], None]
) -> None:
    """`part(all-reduce, rank, call)` for each call, with every program of a rank in a process.

    The interpreter runs the programs of a kernel one after another. Here each process runs one, and
    the programs of a rank meet behind each call. Raises AssertionError where a process fails.
    """
    shared, states = SharedSlots(kind, size), shared_memory((size, 4), torch.int64)
    context = multiprocessing.get_context("fork")
    barriers = [context.Barrier(PROGRAMS) for _ in range(size)]

    def run(rank: int, program: int) -> None:
        torch.set_num_threads(1)
        builder = interpreter.interpreter_builder
        set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
        builder.set_grid_dim = lambda *_: set_dim(PROGRAMS, 1, 1)
        builder.set_grid_idx = lambda *_: set_idx(program, 0, 0)
        way = shared.reduce_of(rank, bound_of(MANY))
        way._state.set_(states[rank])
        way.max_programs = 1  # that is launched
        for call in range(num_calls):
            part(way, rank, call)
            barriers[rank].wait(60)
        os._exit(0)

    processes = [
        context.Process(target=run, args=(rank, program))
        for rank in range(size)
        for program in range(PROGRAMS)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
            assert process.exitcode == 0, process.exitcode
    finally:
        for process in processes:
            process.kill()
            process.join()


def drawn(rank: int, call: int, dtype: torch.dtype, numel: int) -> Tensor:
    """A part with many negative zeros: two of them side by side are the sentinel."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(numel, generator=generator).to(dtype)
    x[torch.rand(numel, generator=generator) < 0.7] = -0.0
    return x


def total(parts: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks, in float32, rounded once."""
    return sum(part.float() for part in parts).to(parts[0].dtype)  # type: ignore[union-attr]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal; in bfloat16, which the interpreter rounds towards zero, up to one step."""
    if actual.dtype == torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(actual, expected)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Negative zeros are not zeros."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
