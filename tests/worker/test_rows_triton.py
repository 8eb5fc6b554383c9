"""The Triton row operations equal their torch references, over random tables."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest
import torch

from nanovllm_core.errors import DeviceError
from nanovllm_core.worker import rows_reference, rows_triton
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import ResultRing
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.runner import get_row_ops
from nanovllm_core.worker.worker import require_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, MAX_LEN, NUM_ROWS = 16, 300, 6


def random_tables(seed: int) -> RowTables:
    """Tables of rows in the middle of their lives: blocks shuffled, some rows finished.

    An odd seed has several cache groups.
    """
    generator = torch.Generator().manual_seed(seed)
    num_groups = 1 if seed % 2 == 0 else seed + 1
    tables = RowTables.allocate(NUM_ROWS, MAX_LEN, BLOCK_SIZE, DEVICE, num_groups)

    def fill(table: torch.Tensor, low: int, high: int) -> None:
        values = torch.randint(low, high, table.shape, generator=generator, dtype=torch.int32)
        table.copy_(values)

    fill(tables.token_ids, 0, 50)
    fill(tables.block_table, 0, 10_000)
    fill(tables.computed, 20, MAX_LEN)
    fill(tables.num_prompt, 1, 20)
    fill(tables.max_length, 25, MAX_LEN + 1)
    fill(tables.min_tokens, 0, 200)
    fill(tables.finished, 0, 2)
    fill(tables.stop_ids, -1, 50)
    tables.computed[0] = MAX_LEN - 1
    tables.finished[:2] = 0
    tables.active_rows.copy_(torch.tensor([3, 0, 5, 1, -1, -1], dtype=torch.int32))
    return tables


def allocate(tables: RowTables, num_tokens: int, num_rows: int) -> StepInputs:
    """A part of a larger step's inputs, as those of a captured step are."""
    num_groups, _, max_blocks = tables.block_table.shape
    larger = StepInputs.allocate(num_tokens + 5, num_rows + 3, max_blocks, DEVICE, num_groups)
    return larger.slice(slice(num_tokens), slice(num_rows))


def assert_same(actual: StepInputs, expected: StepInputs, block_size: int) -> None:
    for field in fields(StepInputs):
        if field.name != "block_table":
            assert torch.equal(getattr(actual, field.name), getattr(expected, field.name)), (
                field.name
            )
    for entry, length in enumerate(expected.seq_lens.tolist()):
        used = -(-length // block_size)
        got, wanted = actual.block_table[:, entry, :used], expected.block_table[:, entry, :used]
        assert torch.equal(got, wanted), f"block table of entry {entry}"


@pytest.mark.parametrize("seed", range(4))
def test_decode_inputs_equal_the_reference(seed: int) -> None:
    """Live, finished and padded entries alike."""
    tables = random_tables(seed)
    actual, expected = (allocate(tables, NUM_ROWS, NUM_ROWS) for _ in range(2))
    rows_triton.prepare_decode(tables, actual)
    rows_reference.prepare_decode(tables, expected)
    assert_same(actual, expected, BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_prefill_inputs_equal_the_reference(seed: int) -> None:
    """Chunks longer than a tile, of one token, of the whole length; rows with a gap behind."""
    tables = random_tables(seed)
    chunks, offset = [], 0
    for row, start, length, samples in [
        (2, 0, 1, 1),
        (0, 3, 280, 0),
        (4, 16, 16, 1),
        (1, 0, 300, 1),
    ]:
        chunks.append((row, start, length, offset, samples))
        offset += length
    staged = torch.full((5, 16), 99, dtype=torch.int32, device=DEVICE)
    packed = staged[:, : len(chunks)]
    packed.copy_(torch.tensor(chunks, dtype=torch.int32).t())
    actual, expected = (allocate(tables, offset, len(chunks)) for _ in range(2))
    rows_triton.prepare_prefill(tables, packed, actual, 300)
    rows_reference.prepare_prefill(tables, packed, expected, 300)
    assert_same(actual, expected, BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_finished_steps_equal_the_reference(seed: int) -> None:
    """Ids written back, lengths, stop ids, min_tokens and flags."""
    ours, theirs = random_tables(seed), random_tables(seed)
    sampled = torch.arange(10, 10 + NUM_ROWS, dtype=torch.int32, device=DEVICE)
    sampled[seed::4] = -1  # No id is left.
    rings = []
    for operations, tables in ((rows_triton, ours), (rows_reference, theirs)):
        inputs = allocate(tables, NUM_ROWS, NUM_ROWS)
        rows_reference.prepare_decode(tables, inputs)
        never = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        ring = ResultRing(DEVICE, NUM_ROWS, num_slots=3)
        for _ in range(4):  # once round the ring
            operations.finish_step(tables, inputs, sampled, ring, never)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        rings.append(ring)
    assert rings[0].num_finished == 4
    assert torch.equal(rings[0].words, rings[1].words)
    assert torch.equal(ours.arena, theirs.arena)


def test_scattered_updates_equal_the_reference() -> None:
    """More updates than one program takes, on both sides of a tile's edge."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 255, 257):
        addresses = torch.randperm(1000, generator=generator)[:count]
        updates = torch.stack([addresses, torch.arange(count)]).int().to(DEVICE)
        ours = torch.zeros(1000, dtype=torch.int32, device=DEVICE)
        theirs = ours.clone()
        rows_triton.scatter_updates(ours, updates)
        rows_reference.scatter_updates(theirs, updates)
        assert torch.equal(ours, theirs)


def test_a_set_skip_flag_stops_the_kernel() -> None:
    """The captured end of a step does nothing where a tail samples."""
    tables = random_tables(0)
    inputs = allocate(tables, NUM_ROWS, NUM_ROWS)
    rows_reference.prepare_decode(tables, inputs)
    before = tables.arena.clone()
    ones = torch.ones(NUM_ROWS, dtype=torch.int32, device=DEVICE)
    ring = ResultRing(DEVICE, NUM_ROWS, num_slots=2)
    rows_triton.finish_step(tables, inputs, ones, ring, ones[:1])
    assert torch.equal(tables.arena, before)
    assert ring.num_finished == 0


def test_the_operations_follow_the_device() -> None:
    """Torch on a CPU; Triton is imported for CUDA only."""
    assert get_row_ops(torch.device("cpu")) is rows_reference


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernel set serves: the worker's own kernels are written in it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    require_triton(torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"cuda needs triton.*pip install"):
        require_triton(torch.device("cuda"))
