"""The one-shot all-reduce in Triton's interpreter; each rank is a process over shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where a GPU is found", allow_module_level=True)

from nanovllm_executor_parallel.one_shot import NUM_SLOTS, SENTINEL, OneShotAllReduce

CAPACITY = 8192
"""Bytes: two blocks and more."""

Part = Callable[[OneShotAllReduce, int], Sequence[Tensor]]


class SharedSlots:
    """The slots of all ranks in memory that forked processes share, at the same addresses."""

    def __init__(self, size: int) -> None:
        words = size * NUM_SLOTS * size * CAPACITY // 4
        self._memory = mmap.mmap(-1, 4 * words)
        shape = (size, NUM_SLOTS, size, CAPACITY // 4)
        self.slots = torch.frombuffer(self._memory, dtype=torch.int32).view(shape)
        self.slots.fill_(SENTINEL)

    def reduce_of(self, rank: int, polls: float = 1e6) -> OneShotAllReduce:
        """The all-reduce of a rank; the interpreter counts polls, not nanoseconds."""
        peers = torch.tensor([one.data_ptr() for one in self.slots])
        return OneShotAllReduce(rank, self.slots[rank], peers, polls * 1e-9)


def run_ranks(size: int, part: Part) -> list[list[Tensor]]:
    """What `part` returns on each rank, all of them at once."""
    shared = SharedSlots(size)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        results = part(shared.reduce_of(rank), rank)
        pipes[rank][1].send([(one.dtype, one.view(torch.uint8).numpy()) for one in results])
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    received = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return [[torch.from_numpy(x).view(dtype) for dtype, x in results] for results in received]


def drawn(rank: int, call: int, dtype: torch.dtype, numel: int) -> Tensor:
    """A part with negative zeros in it: pairs of them are the sentinel."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(numel, generator=generator).to(dtype)
    x[torch.rand(numel, generator=generator) < 0.7] = -0.0
    return x


CALLS = [(torch.float16, 8), (torch.bfloat16, 2056), (torch.float32, 700), (torch.float16, 1024),
         (torch.bfloat16, 16), (torch.float32, 4)]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_sum_with_equal_bits(size: int) -> None:
    """Calls of other sizes and dtypes follow each other; each slot is used again."""

    def part(reduce: OneShotAllReduce, rank: int) -> list[Tensor]:
        return [reduce(drawn(rank, call, *CALLS[call])) for call in range(len(CALLS))]

    results = run_ranks(size, part)
    for call, (dtype, numel) in enumerate(CALLS):
        parts = torch.stack([drawn(rank, call, dtype, numel) for rank in range(size)]).float()
        expected = (parts[0] + parts[1] + (parts[2] if size == 3 else 0)).to(dtype)
        for rank in range(size):
            assert torch.equal(results[rank][call], expected), (call, rank)
