"""The one-shot all-reduce in Triton's interpreter; each rank is a process over shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where a GPU is found", allow_module_level=True)

from nanovllm_executor_parallel import one_shot
from nanovllm_executor_parallel.one_shot import NUM_SLOTS, SENTINEL, OneShotAllReduce

CAPACITY = 8192
"""Bytes: sixteen blocks."""
MAX_PROGRAMS = 3
"""Of some parts a program has several blocks, and not all programs have as many."""

Part = Callable[[OneShotAllReduce, int], Sequence[Tensor]]


class SharedSlots:
    """The slots of all ranks in memory that forked processes share, at the same addresses."""

    def __init__(self, size: int) -> None:
        shape = (size, NUM_SLOTS, size, CAPACITY // 4)
        self._memory = mmap.mmap(-1, size * NUM_SLOTS * size * CAPACITY)
        self.slots = torch.frombuffer(self._memory, dtype=torch.int32).view(shape)
        self.slots.fill_(SENTINEL)

    def reduce_of(self, rank: int, polls: int = 10**6) -> OneShotAllReduce:
        """The all-reduce of a rank. Its bound counts polls: the interpreter has no clock."""
        peers = torch.tensor([one.data_ptr() for one in self.slots])
        return OneShotAllReduce(rank, self.slots[rank], peers, polls * 1e-9, MAX_PROGRAMS)


def run_ranks(size: int, part: Part) -> list[list[Tensor]]:
    """What `part` returns on each rank, all of them at once."""
    shared = SharedSlots(size)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # the pools of threads are not forked
        results = part(shared.reduce_of(rank), rank)
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


CALLS = [
    (torch.float16, 8),
    (torch.bfloat16, 2056),
    (torch.float32, 700),
    (torch.float16, 1024),
    (torch.bfloat16, 16),
    (torch.float32, 4),
    (torch.float16, 2048),
]
"""More than twice the slots; one unit to many blocks, and parts of blocks."""


def reduce_all(reduce: OneShotAllReduce, rank: int) -> list[Tensor]:
    """All CALLS."""
    return [reduce(drawn(rank, call, *CALLS[call])) for call in range(len(CALLS))]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_sum_with_equal_bits(size: int) -> None:
    """Sizes and dtypes change from call to call, and every slot is used again."""
    results = run_ranks(size, reduce_all)
    for call, one in enumerate(CALLS):
        parts = [drawn(rank, call, *one) for rank in range(size)]
        assert_close(results[0][call], total(parts))
        for other in results[1:]:
            assert torch.equal(other[call].view(torch.uint8), results[0][call].view(torch.uint8))
        if size == 3 and one == (torch.float32, 700):
            assert not torch.equal(total(parts), total(parts[::-1])), "other orders would show"


def test_the_sum_is_added_to_a_residual() -> None:
    """In float32 with one rounding; x stays as it is."""
    numel = 1032

    def part(reduce: OneShotAllReduce, rank: int) -> list[Tensor]:
        results = []
        for call, dtype in enumerate((torch.float16, torch.float32, torch.float16)):
            x, residual = drawn(rank, call, dtype, numel), drawn(9, call, dtype, numel)
            results += [reduce(x, residual), x]
        return results

    results = run_ranks(2, part)
    for call in range(3):
        dtype = results[0][2 * call].dtype
        parts = [drawn(rank, call, dtype, numel) for rank in (0, 1, 9)]
        for rank in range(2):
            assert torch.equal(results[rank][2 * call], total(parts))
            assert torch.equal(results[rank][2 * call + 1], parts[rank])


def test_a_slot_is_empty_again_after_the_next_call() -> None:
    """Whatever the sizes of the two calls. Until then it holds the parts of all other ranks."""

    def part(reduce: OneShotAllReduce, rank: int) -> list[Tensor]:
        states = []
        for call, numel in enumerate((2048, 8, 1024, 16)):
            reduce(drawn(rank, call, torch.float32, numel) + 1)
            is_empty = (reduce._slots == SENTINEL).flatten(1).all(1)
            states.append(is_empty[[(call - 1) % NUM_SLOTS, call % NUM_SLOTS]])
        return states

    for states in run_ranks(2, part):
        assert [one.tolist() for one in states] == [[True, False]] * 4


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait ends after the bound, those of other blocks and calls at once; it is reported."""
    looks, read_clock = [], one_shot.read_clock
    monkeypatch.setattr(
        one_shot, "read_clock", lambda *given: looks.append(None) or read_clock(*given)
    )
    shared = SharedSlots(2)
    reduce = shared.reduce_of(1, polls=50)
    reduce.max_programs = 1
    x = torch.ones(CAPACITY // 4)
    assert reduce.missing() is None
    for _ in range(4):
        reduce(x)
    assert reduce.missing() == (0, 0)
    num_blocks = 4 * CAPACITY // (4 * one_shot.BLOCK)
    assert len(looks) < 60 + 3 * num_blocks


@pytest.mark.parametrize(
    ("name", "fault", "has_all", "last_is_right"),
    [
        ("clear", lambda *_: None, True, False),
        ("mark_as_sent", lambda words: words, False, True),
    ],
    ids=["clear", "mark_as_sent"],
)
def test_a_kernel_that_does_less_is_found(
    name: str,
    fault: Callable[..., object],
    has_all: bool,
    last_is_right: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Old data is taken for new if no slot is cleared; a sentinel in the data is waited for.

    The ranks take turns in one process, so neither is late: rank 1 sends and does not wait, and
    rank 0 finds all parts there. Only in the last call rank 0 would have to wait.
    """
    monkeypatch.setattr(one_shot, name, fault)
    shared = SharedSlots(2)
    receiver, sender = shared.reduce_of(0, polls=20), shared.reduce_of(1, polls=0)
    are_right = []
    for call in range(NUM_SLOTS + (name == "clear")):
        parts = [drawn(rank, call, torch.float16, CAPACITY // 2) for rank in (0, 1)]
        expected = total(parts)
        if call < NUM_SLOTS:
            sender(parts[1])
        are_right.append(torch.equal(receiver(parts[0]), expected))
    assert (receiver.missing() is None) == has_all
    assert are_right == [True] * (len(are_right) - 1) + [last_is_right]


def test_an_order_that_differs_between_ranks_is_found() -> None:
    """Such as the order of arrival: three numbers have other sums in float32."""
    add = one_shot.add

    def part(reduce: OneShotAllReduce, rank: int) -> list[Tensor]:
        def add_from_own(words: Any, *arguments: object) -> object:
            words.handle.data[:3] = np.roll(words.handle.data[:3], rank, axis=0)
            return add(words, *arguments)

        one_shot.add = add_from_own  # in this rank's process alone
        return [reduce(drawn(rank, 2, torch.float32, 700))]

    results = [result for (result,) in run_ranks(3, part)]
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
