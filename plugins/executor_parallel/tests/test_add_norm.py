"""All-reduces of whole rows with the norm of the sum, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where a GPU is found", allow_module_level=True)

from nanovllm_core.kernels import TorchKernels
from nanovllm_executor_parallel.slots import NUM_SLOTS, SENTINEL, SlotAllReduce
from nanovllm_executor_parallel.symmetric import SymmetricAllReduce

from .shared_slots import (
    KINDS,
    PROGRAMS,
    Kind,
    SharedSlots,
    bound_of,
    drawn,
    equal_bits,
    run_programs,
    run_ranks,
    shared_memory,
    total,
)

EPS = 1e-5
CALLS = [
    (torch.float16, torch.float16, 5, 24),
    (torch.float32, torch.float32, 9, 12),
    (torch.float16, torch.float32, 2, 520),
    (torch.bfloat16, torch.bfloat16, 3, 40),
    (torch.float16, torch.float16, 40, 136),
]
"""dtype of x and of the weight, rows, numbers. The last does not fit the slots at once."""


def rows_of(rank: int, call: int) -> Tensor:
    dtype, _, rows, numbers = CALLS[call]
    return drawn(rank, call, dtype, rows * numbers).view(rows, numbers)


def weight_of(call: int) -> Tensor:
    _, dtype, _, numbers = CALLS[call]
    return torch.randn(numbers, generator=torch.Generator().manual_seed(call)).to(dtype)


def observe(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
    """Sums and norms of all calls; between them sums of other bytes, in the same slots."""
    results = []
    for call in range(len(CALLS)):
        for way in ways:
            way.max_programs = 1  # the interpreter runs one after another, and they wait for others
            residual = rows_of(9, call)
            normed = way.add_norm(rows_of(rank, call), residual, weight_of(call), EPS)
            results += [residual, normed, way(drawn(rank, call, torch.float32, 700))]
    return results


@pytest.mark.parametrize(
    ("kinds", "size"),
    [(KINDS[:1], 2), (KINDS[1:], 3), (KINDS, 4)],
    ids=lambda one: one if isinstance(one, int) else "+".join(kind.name for kind in one),
)
def test_the_sum_and_its_norm_are_those_of_two_kernels(kinds: Sequence[Kind], size: int) -> None:
    """On every rank with equal bits: the sum exactly, the norm to a rounding."""
    results = run_ranks(kinds, size, observe)
    for call in range(len(CALLS)):
        parts = [rows_of(rank, call) for rank in (*range(size), 9)]
        for way in range(len(kinds)):
            first = 3 * (call * len(kinds) + way)
            residual, normed, flat = results[0][first : first + 3]
            step = torch.finfo(residual.dtype).eps
            exact = 0 if residual.dtype != torch.bfloat16 else step  # its rounding, interpreted
            torch.testing.assert_close(residual, total(parts), rtol=exact, atol=0)
            expected = TorchKernels().rms_norm(residual, weight_of(call), EPS)
            torch.testing.assert_close(normed, expected, rtol=3 * step, atol=1e-6)
            words = [drawn(rank, call, torch.float32, 700) for rank in range(size)]
            assert torch.equal(flat, total(words))
            for other in results[1:]:
                assert all(map(equal_bits, other[first : first + 3], results[0][first:]))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_slot_of_rows_is_empty_again_after_the_next_call(kind: Kind) -> None:
    """Whichever of the two kernels makes the next call. A third may be receiving already."""

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        (way,) = ways
        way.max_programs = 1
        found = []
        for call in range(6):
            if call % 2:
                way(drawn(rank, call, torch.float32, (12, 1500, 8)[call // 2]) + 1)
            else:
                drawing = call // 2
                residual, weight = rows_of(9, drawing), weight_of(drawing)
                way.add_norm(rows_of(rank, drawing) + 1, residual, weight, EPS)
            is_empty = (way._slots == SENTINEL).flatten(2).all(2)
            found.append(is_empty[[(call - 1) % NUM_SLOTS, call % NUM_SLOTS]])
        return found

    for found in run_ranks([kind], 2, part):
        areas = kind.num_areas
        assert [one.tolist() for one in found] == [[[True] * areas, [False] * areas]] * 6


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_programs_of_a_wave_send_for_one_another(kind: Kind) -> None:
    """Each program of each rank is a process here: a row's words come from several of them.

    Fewer rows than programs, as many, and several waves; parts of a row have 128 words.
    """
    size, dtype = 2, torch.float16
    shapes = [(1, 1024), (PROGRAMS, 264), (8, 16), (2, 640)]
    most = max(rows * numbers for rows, numbers in shapes)
    memory = shared_memory((size, len(shapes), 2, most), dtype)

    def tensors(rank: int, call: int) -> tuple[Tensor, ...]:
        rows, numbers = shapes[call]
        return tuple(one[: rows * numbers].view(rows, numbers) for one in memory[rank, call])

    def part(way: SlotAllReduce, rank: int, call: int) -> None:
        residual, normed = tensors(rank, call)
        x = drawn(rank, call, dtype, residual.numel()).view_as(residual)
        with mock.patch.object(torch, "empty_like", return_value=normed):
            way.add_norm(x, residual, torch.ones(residual.shape[1]), EPS)

    for rank in range(size):
        for call in range(len(shapes)):
            residual, _ = tensors(rank, call)
            residual.copy_(drawn(9, call, dtype, residual.numel()).view_as(residual))
    run_programs(kind, size, len(shapes), part)
    for rank in range(size):
        for call in range(len(shapes)):
            residual, normed = tensors(rank, call)
            parts = [drawn(one, call, dtype, residual.numel()) for one in (*range(size), 9)]
            assert torch.equal(residual.flatten(), total(parts))
            expected = TorchKernels().rms_norm(residual, torch.ones(residual.shape[1]), EPS)
            torch.testing.assert_close(normed, expected, rtol=2**-8, atol=1e-6)
            assert equal_bits(normed, tensors(0, call)[1])


def test_who_sums_and_norms() -> None:
    """From a size on, rows of whole units that fit; factors of x's dtype or of float32."""
    way = SharedSlots(KINDS[0], 2).reduce_of(0, bound_of(1))
    assert [way.takes_rows_of(n) for n in (16, 24, 8192, 8208)] == [True, False, True, False]
    symmetric = SymmetricAllReduce.__new__(SymmetricAllReduce)
    symmetric.ways, symmetric._limits, symmetric._norm_from = [way], [8192], 64
    for rows, numbers, dtype, is_taken in (
        (2, 16, torch.float16, True),
        (2, 16, torch.float32, True),
        (2, 16, torch.bfloat16, False),
        (1, 16, torch.float16, False),
        (0, 16, torch.float16, False),
        (2, 20, torch.float16, False),
        (5, 1024, torch.float16, False),
    ):
        x = torch.zeros(rows, numbers, dtype=torch.float16)
        found = symmetric.find_for_norm(x, x.clone(), torch.zeros(numbers, dtype=dtype))
        assert (found is way) == is_taken, SimpleNamespace(rows=rows, numbers=numbers, dtype=dtype)
