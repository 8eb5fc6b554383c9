"""One-shot and two-shot all-reduces in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where a GPU is found", allow_module_level=True)

from nanovllm_executor_parallel import one_shot, slots, two_shot
from nanovllm_executor_parallel.one_shot import OneShotAllReduce
from nanovllm_executor_parallel.slots import BLOCK, NUM_SLOTS, SENTINEL, SlotAllReduce
from nanovllm_executor_parallel.two_shot import TwoShotAllReduce

from .shared_slots import (
    CAPACITY,
    KINDS,
    Kind,
    SharedSlots,
    assert_close,
    bound_of,
    drawn,
    equal_bits,
    run_ranks,
    total,
)

MODULES = {OneShotAllReduce: one_shot, TwoShotAllReduce: two_shot}
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])

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


@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        ([OneShotAllReduce], 2),
        ([OneShotAllReduce], 3),
        ([TwoShotAllReduce], 2),
        ([TwoShotAllReduce], 3),
        ([OneShotAllReduce, TwoShotAllReduce], 4),
    ],
    ids=lambda one: one if isinstance(one, int) else "+".join(kind.name for kind in one),
)
def test_all_ranks_have_the_sum_with_equal_bits(kinds: Sequence[Kind], size: int) -> None:
    """Sizes and dtypes change from call to call, every slot is used again, and ways alternate.

    The sum is added to a residual in every third call.
    """

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        results = []
        for call, one in enumerate(CALLS):
            for way in ways:
                residual = drawn(9, call, *one) if call % 3 == 2 else None
                results.append(way(drawn(rank, call, *one), residual))
        return results

    results = run_ranks(kinds, size, part)
    for call, one in enumerate(CALLS):
        parts = [drawn(rank, call, *one) for rank in range(size)]
        if size == 3 and one == (torch.float32, 700):
            assert not torch.equal(total(parts), total(parts[::-1])), "other orders would show"
        if call % 3 == 2:
            parts.append(drawn(9, call, *one))
        for way in range(len(kinds)):
            index = call * len(kinds) + way
            assert_close(results[0][index], total(parts))
            assert all(equal_bits(other[index], results[0][index]) for other in results[1:])


@EACH_KIND
def test_the_sum_is_added_to_a_residual(kind: Kind) -> None:
    """In float32 with one rounding; x stays as it is."""
    numel = 1032

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        results = []
        for call, dtype in enumerate((torch.float16, torch.float32, torch.float16)):
            x, residual = drawn(rank, call, dtype, numel), drawn(9, call, dtype, numel)
            results += [ways[0](x, residual), x]
        return results

    results = run_ranks([kind], 2, part)
    for call in range(3):
        dtype = results[0][2 * call].dtype
        parts = [drawn(rank, call, dtype, numel) for rank in (0, 1, 9)]
        for rank in range(2):
            assert torch.equal(results[rank][2 * call], total(parts))
            assert torch.equal(results[rank][2 * call + 1], parts[rank])


@EACH_KIND
def test_a_slot_is_empty_again_after_the_next_call(kind: Kind) -> None:
    """In all its areas, and with calls of any sizes. Until then it holds what others have sent."""

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        states = []
        for call, numel in enumerate((2048, 8, 1024, 16)):
            ways[0](drawn(rank, call, torch.float32, numel) + 1)
            is_empty = (ways[0]._slots == SENTINEL).flatten(2).all(2)
            states.append(is_empty[[(call - 1) % NUM_SLOTS, call % NUM_SLOTS]])
        return states

    for states in run_ranks([kind], 2, part):
        assert [one.tolist() for one in states] == [
            [[True] * kind.num_areas, [False] * kind.num_areas]
        ] * 4


@EACH_KIND
def test_a_rank_that_does_not_come_is_named(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait ends after the bound; those of other blocks, calls and ways at once."""
    looks, read_clock = [], slots.read_clock
    monkeypatch.setattr(
        slots, "read_clock", lambda *given: looks.append(None) or read_clock(*given)
    )
    bound = bound_of(50)
    ways = [SharedSlots(one, 3).reduce_of(1, bound) for one in (kind, *KINDS)]
    x = torch.ones(CAPACITY // 4)
    assert ways[0].missing() is None
    for way in ways:
        way.max_programs = 1
        for _ in range(2):
            way(x)
    assert [way.missing() for way in ways] == [(0, 0), None, None]
    waits = 6 * CAPACITY // (4 * BLOCK)
    assert len(looks) < 60 + 3 * waits


@EACH_KIND
def test_an_order_that_differs_between_ranks_is_found(kind: Kind) -> None:
    """Such as the order of arrival: three numbers have other sums in float32."""
    module: Any = MODULES[kind]
    add = module.add

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        def add_from_own(words: Any, *arguments: object) -> object:
            words.handle.data[:3] = np.roll(words.handle.data[:3], rank, axis=0)
            return add(words, *arguments)

        module.add = add_from_own  # in this rank's process alone
        return [ways[0](drawn(rank, 2, torch.float32, 700))]

    results = [result for (result,) in run_ranks([kind], 3, part)]
    expected = total([drawn(rank, 2, torch.float32, 700) for rank in range(3)])
    assert not all(torch.equal(result, expected) for result in results)
    # One owner's order is that of all ranks.
    assert torch.equal(results[0], results[1]) == (kind is TwoShotAllReduce)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


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
    shared = SharedSlots(OneShotAllReduce, 2)
    receiver, sender = shared.reduce_of(0, bound_of(20)), shared.reduce_of(1, bound_of(0))
    are_right = []
    for call in range(NUM_SLOTS + (name == "clear")):
        parts = [drawn(rank, call, torch.float16, CAPACITY // 2) for rank in (0, 1)]
        expected = total(parts)
        if call < NUM_SLOTS:
            sender(parts[1])
        are_right.append(torch.equal(receiver(parts[0]), expected))
    assert (receiver.missing() is None) == has_all
    assert are_right == [True] * (len(are_right) - 1) + [last_is_right]
