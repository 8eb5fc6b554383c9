"""What is the two-shot all-reduce's own, and faults that its tests find; see `test_slots.py`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled where a GPU is found", allow_module_level=True)

from nanovllm_executor_parallel import two_shot
from nanovllm_executor_parallel.slots import NUM_SLOTS, SENTINEL, SlotAllReduce
from nanovllm_executor_parallel.two_shot import TwoShotAllReduce

from .shared_slots import drawn, equal_bits, run_ranks, total

SIZE = 3
BRIEF = 500
"""A bound in polls, for kernels that wait in vain: about 0.2 s."""


def mutant(folder: Path, replaced: str, by: str) -> Any:
    """The module with a change of its text."""
    text = Path(two_shot.__file__).read_text(encoding="utf-8")
    assert text.count(replaced) == 1, replaced
    file = folder / "two_shot_mutant.py"
    file.write_text(text.replace(replaced, by), encoding="utf-8")
    spec = util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def denormals(rank: int, numel: int = 8) -> Tensor:
    """Numbers of float32 whose sum over ranks is the sentinel."""
    half = SENTINEL - 0x4000
    return torch.full((numel,), (half, half, 0)[rank], dtype=torch.int32).view(torch.float32)


CALLS = ((torch.float32, 1540, True), (torch.float16, 2056, False), (torch.float32, 8, True))
"""dtype, numbers, and whether there is a residual."""


def observe(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
    """Results of some calls, and behind each of them whether its slot and the one before are empty.

    The third slot may have words of a rank that is in its next call.
    """
    (way,) = ways
    results = []
    for call, (dtype, numel, has_residual) in enumerate(CALLS):
        residual = drawn(9, call, dtype, numel) if has_residual else None
        results.append(way(drawn(rank, call, dtype, numel), residual))
        is_empty = (way._slots == SENTINEL).flatten(2).all(2)
        results.append(is_empty[[(call - 1) % NUM_SLOTS, call % NUM_SLOTS]])
    results.append(way(denormals(rank)))
    return results


def expected() -> list[Tensor]:
    """What `observe` returns on every rank."""
    results = []
    for call, (dtype, numel, has_residual) in enumerate(CALLS):
        parts = [drawn(rank, call, dtype, numel) for rank in range(SIZE)]
        results.append(total([*parts, *[drawn(9, call, dtype, numel)] * has_residual]))
        results.append(torch.tensor([[True, True], [False, False]]))
    return [*results, torch.zeros(8)]


def test_sums_are_those_of_the_owner() -> None:
    """A sum that equals the sentinel is zero on all ranks; an exact sum has equal bits."""
    assert torch.all(total([*map(denormals, range(SIZE))]).view(torch.int32) == SENTINEL)
    results = run_ranks([TwoShotAllReduce], SIZE, observe)
    for result in results:
        assert all(map(torch.equal, result, expected()))
        assert all(map(equal_bits, result, results[0]))


FAULTS = {
    "parts are not cleared": ("(old_ptr, is_peer, num_old_units,", "(old_ptr, is_peer, 0,"),
    "sums are not cleared": ("[:, None], num_old_units,", "[:, None], 0,"),
    "the units of x are those of a row": ("slot, shard // 4)", "slot, num_units // SIZE)"),
    "parts are not marked": ("sent += (mark_as_sent(", "sent += (("),
    "sums are not marked": ("mark_as_sent(add(", "(add("),
    "the residual is added by every rank": (
        "at, received, mask",
        "at, (received.to(tl.float32, bitcast=True) + tl.load(out_ptr + at, mask=at < num_words, "
        "other=0).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True), mask",
    ),
    "a neighbour's shard is sent": ("(rank + 1 + step) % SIZE *", "(rank + step) % SIZE *"),
    "a neighbour's residual is added": ("tl.load(out_ptr + at", "tl.load(out_ptr + columns"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found(fault: str, tmp_path: Path) -> None:
    """By its results, or by what it leaves in the slots."""
    faulty = mutant(tmp_path, *FAULTS[fault])
    results = run_ranks([faulty.TwoShotAllReduce], SIZE, observe, polls=BRIEF)
    assert not all(all(map(torch.equal, result, expected())) for result in results)


def test_a_rank_whose_sums_do_not_come_is_named(tmp_path: Path) -> None:
    """It had sent its parts. All other ranks name it, and do not wait again."""
    silent = mutant(tmp_path, "tl.store(peer_ptrs[step] + sum_at + columns, out)", "pass")

    def part(ways: Sequence[SlotAllReduce], rank: int) -> list[Tensor]:
        (way,) = ways
        if rank == 1:
            way.kernel = silent.two_shot_kernel  # type: ignore[misc]
        way(torch.ones(300))  # one program: the interpreter runs one after another
        return [torch.tensor(way.missing() or ()), way._bound.nanoseconds]

    for rank, (missing, bound) in enumerate(run_ranks([TwoShotAllReduce], SIZE, part, 8 * BRIEF)):
        assert (missing.tolist(), bool(bound)) == (([], True) if rank == 1 else ([1, 0], False))
