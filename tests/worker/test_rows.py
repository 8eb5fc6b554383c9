"""The device's row tables: updates land where they belong, steps are built and written back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.plan import (
    MAX_DEVICE_STOP_IDS,
    PADDED,
    Admission,
    RowSampling,
)
from nanovllm_core.worker import rows_reference
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import ResultRing
from nanovllm_core.worker.rows import RowTables, RowUpdates, StagingRing

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_LEN = 32


def make_tables(num_rows: int = 4) -> RowTables:
    return RowTables.allocate(num_rows, MAX_LEN, BLOCK_SIZE, CPU)


def admission(row: int, token_ids: list[int], **changes: Any) -> Admission:
    fields: dict[str, Any] = {
        "row": row,
        "token_ids": np.array(token_ids, dtype=np.int32),
        "num_prompt_tokens": len(token_ids),
        "num_computed": 0,
        "block_ids": np.arange(
            10 * row, 10 * row + -(-len(token_ids) // BLOCK_SIZE), dtype=np.int32
        )[None],
        "max_length": MAX_LEN,
        "sampling": RowSampling(),
    }
    return Admission(**{**fields, **changes})


def apply(tables: RowTables, updates: RowUpdates) -> None:
    packed = updates.take()
    if packed is not None:
        rows_reference.scatter_updates(tables.arena, StagingRing(CPU, num_slots=1).copy(packed))


def admit(tables: RowTables, *admissions: Admission, active: tuple[int, ...] = ()) -> None:
    updates = RowUpdates(tables)
    for one in admissions:
        updates.admit(one)
    updates.set_active_rows(active)
    apply(tables, updates)


def decode_inputs(tables: RowTables, num_rows: int) -> StepInputs:
    inputs = StepInputs.allocate(num_rows, num_rows, tables.block_table.shape[2], CPU)
    rows_reference.prepare_decode(tables, inputs)
    return inputs


def test_a_fresh_row_is_finished_and_no_row_is_active() -> None:
    """Before any admission every row counts as padding, so nothing can be computed by mistake."""
    tables = make_tables()
    assert tables.finished.tolist() == [1, 1, 1, 1]
    assert decode_inputs(tables, 2).rows.tolist() == [-1, -1]


def test_an_admission_sets_every_table_of_its_row_and_no_other() -> None:
    """Ids, blocks, lengths, stop ids, temperature bits and the 64-bit seed are in the right row."""
    tables = make_tables()
    sampling = RowSampling(
        temperature=0.7, seed=2**63 + 5, min_tokens=3, stop_token_ids=(7, 9), top_k=4
    )
    admit(tables, admission(2, [5, 6, 7, 8, 9], num_computed=4, max_length=11, sampling=sampling))
    assert tables.token_ids[2, :5].tolist() == [5, 6, 7, 8, 9]
    assert tables.block_table[0, 2, :2].tolist() == [20, 21]
    assert tables.computed[2] == 4
    assert tables.num_prompt[2] == 5
    assert tables.max_length[2] == 11
    assert tables.min_tokens[2] == 3
    assert tables.finished.tolist() == [1, 1, 0, 1]
    assert tables.stop_ids[2].tolist() == [7, 9] + [-1] * (MAX_DEVICE_STOP_IDS - 2)
    assert tables.temperature[2].item() == pytest.approx(0.7)
    assert tables.seed[2].item() == 2**63 + 5 - 2**64
    others = [0, 1, 3]
    assert not tables.token_ids[others].any()
    assert not tables.seed[others].any()


def test_more_stop_ids_than_the_device_holds_are_cut() -> None:
    """The device checks the first ids; the rest are the engine's to check."""
    tables = make_tables()
    ids = tuple(range(100, 100 + MAX_DEVICE_STOP_IDS + 3))
    admit(tables, admission(0, [1], sampling=RowSampling(stop_token_ids=ids)))
    assert tables.stop_ids[0].tolist() == list(ids[:MAX_DEVICE_STOP_IDS])


def test_blocks_are_appended_to_the_rows_they_name() -> None:
    """An append changes one entry of one block table."""
    tables = make_tables()
    updates = RowUpdates(tables)
    updates.append_blocks(np.array([(1, 0, 3, 77), (3, 0, 0, 5)], np.int32))
    apply(tables, updates)
    assert tables.block_table[0, 1, 3] == 77
    assert tables.block_table[0, 3, 0] == 5
    assert int((tables.block_table != 0).sum()) == 2


def test_every_group_has_block_tables_of_its_own() -> None:
    """A block that is gone behind a window is a block's number all the same."""
    tables = RowTables.allocate(4, MAX_LEN, BLOCK_SIZE, CPU, num_groups=2)
    tables.block_table.fill_(99)
    block_ids = np.array([[5, 6, 7], [-1, 8, 9]], np.int32)
    updates = RowUpdates(tables)
    updates.admit(admission(2, [1] * 9, num_computed=8, block_ids=block_ids))
    updates.append_blocks(np.array([(2, 0, 3, 77), (2, 1, 3, 78)], np.int32))
    updates.set_active_rows(np.array([2], np.int32))
    apply(tables, updates)
    assert tables.block_table[:, 2, :4].tolist() == [[5, 6, 7, 77], [0, 8, 9, 78]]
    assert int((tables.block_table != 99).sum()) == 8
    inputs = StepInputs.allocate(2, 2, tables.block_table.shape[2], CPU, num_groups=2)
    rows_reference.prepare_decode(tables, inputs)
    assert inputs.slot_mapping.tolist() == [[7 * BLOCK_SIZE, -1], [9 * BLOCK_SIZE, -1]]
    assert inputs.block_table[:, 0, :3].tolist() == [[5, 6, 7], [0, 8, 9]]
    chunk = torch.tensor([[2], [8], [1], [0], [1]], dtype=torch.int32)
    rows_reference.prepare_prefill(tables, chunk, inputs.slice(slice(1), slice(1)), 1)
    assert inputs.slot_mapping.tolist() == [[7 * BLOCK_SIZE, -1], [9 * BLOCK_SIZE, -1]]


@pytest.mark.parametrize("groups", [1, 3])
def test_an_admission_for_other_cache_groups_is_refused(groups: int) -> None:
    """Its tables would be another's, or none's."""
    tables = RowTables.allocate(4, MAX_LEN, BLOCK_SIZE, CPU, num_groups=2)
    block_ids = np.ones((groups, 3), np.int32)
    said = f"row 2 has block tables for {groups} cache groups, the worker has 2"
    with pytest.raises(InconsistentStateError, match=said):
        RowUpdates(tables).admit(admission(2, [1] * 9, block_ids=block_ids))


def test_nothing_collected_is_nothing_to_copy() -> None:
    """A steady step sends no bytes."""
    assert RowUpdates(make_tables()).take() is None


def test_a_decode_entry_reads_the_id_at_its_computed_position() -> None:
    """Position, slot and id are those of the first position not yet computed (bug 10)."""
    tables = make_tables()
    admit(tables, admission(1, [5, 6, 7, 8, 9], num_computed=4), active=(1,))
    inputs = decode_inputs(tables, 2)
    assert inputs.rows.tolist() == [1, -1]
    assert inputs.input_ids[0] == 9
    assert inputs.positions[0] == 4
    assert inputs.slot_mapping.tolist() == [[11 * BLOCK_SIZE, -1]]
    assert inputs.seq_lens.tolist() == [5, 0]
    assert inputs.output_index[0] == 0


def test_padded_entries_neither_read_nor_write() -> None:
    """Padding has slot -1 and length 0 (bug 9), also where a row finished after the plan."""
    tables = make_tables()
    admit(tables, admission(0, [3], num_computed=0), active=(0,))
    tables.finished[0] = 1
    inputs = decode_inputs(tables, 3)
    assert inputs.slot_mapping.tolist() == [[-1, -1, -1]]
    assert inputs.seq_lens.tolist() == [0, 0, 0]
    before = tables.arena.clone()
    assert finish(tables, inputs, [1, 2, 3]) == [(PADDED, False)] * 3
    assert torch.equal(tables.arena, before)


def finish(tables: RowTables, inputs: StepInputs, sampled: list[int]) -> list[tuple[int, bool]]:
    """Finish a step; what the host then reads of each entry."""
    ring = ResultRing(CPU, tables.computed.numel(), num_slots=2)
    ring.push(inputs.num_rows)
    ids = torch.tensor(sampled, dtype=torch.int32)
    rows_reference.finish_step(tables, inputs, ids, ring, torch.zeros(1, dtype=torch.int32))
    result = ring.collect()
    return list(zip(result.token_ids.tolist(), result.finished.tolist(), strict=True))


def test_a_sampled_id_is_written_back_and_the_row_advances() -> None:
    """The id lands after the computed position and is the next step's input."""
    tables = make_tables()
    admit(tables, admission(0, [3, 4], num_computed=1), active=(0,))
    inputs = decode_inputs(tables, 1)
    assert finish(tables, inputs, [42]) == [(42, False)]
    assert tables.token_ids[0, :3].tolist() == [3, 4, 42]
    following = decode_inputs(tables, 1)
    assert following.input_ids.tolist() == [42]
    assert following.positions.tolist() == [2]
    assert following.output_index.tolist() == [1]


@pytest.mark.parametrize(
    ("min_tokens", "max_length", "token", "finished"),
    [(0, 32, 9, 1), (2, 32, 9, 0), (0, 3, 8, 1), (0, 4, 8, 0), (1, 32, 9, 1)],
)
def test_a_row_finishes_on_a_stop_id_after_min_tokens_or_on_its_length(
    min_tokens: int, max_length: int, token: int, finished: int
) -> None:
    """The flag is set on the device, so that a step already launched treats the row as padding."""
    tables = make_tables()
    sampling = RowSampling(stop_token_ids=(9,), min_tokens=min_tokens)
    one = admission(0, [3, 4], num_computed=1, max_length=max_length, sampling=sampling)
    admit(tables, one, active=(0,))
    assert finish(tables, decode_inputs(tables, 1), [token]) == [(token, bool(finished))]
    assert decode_inputs(tables, 1).rows.tolist() == [-1 if finished else 0]


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_row_that_is_left_no_id_ends(min_tokens: int) -> None:
    """The host gets -1 and the flag, and no later step reads the -1 as an id."""
    tables = make_tables()
    sampling = RowSampling(stop_token_ids=(*range(8),), min_tokens=min_tokens)
    admit(tables, admission(0, [3, 4], num_computed=1, sampling=sampling), active=(0,))
    assert finish(tables, decode_inputs(tables, 1), [-1]) == [(PADDED, True)]
    following = decode_inputs(tables, 1)
    assert (following.rows.tolist(), following.input_ids.tolist()) == ([-1], [0])


def test_the_last_id_of_the_longest_sequence_writes_no_neighbour() -> None:
    """A row that reaches the model's length writes no id past its own table."""
    tables = make_tables(2)
    admit(tables, admission(0, [1] * MAX_LEN, num_computed=MAX_LEN - 1), active=(0,))
    assert finish(tables, decode_inputs(tables, 1), [42]) == [(42, True)]
    assert not (tables.token_ids == 42).any()


def test_a_skipped_sampler_changes_nothing() -> None:
    """Where the flag is set the tail samples, so the captured end of the step must do nothing."""
    tables = make_tables()
    admit(tables, admission(0, [3, 4], num_computed=1), active=(0,))
    inputs, before = decode_inputs(tables, 1), tables.arena.clone()
    ring, one = ResultRing(CPU, 4, num_slots=2), torch.ones(1, dtype=torch.int32)
    rows_reference.finish_step(tables, inputs, one, ring, skip=one)
    assert torch.equal(tables.arena, before)
    assert not ring.words.any()
    assert ring.num_finished == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_prompt_chunks_are_laid_out_one_after_another(data: st.DataObject) -> None:
    """Every token of every chunk has its id, position and slot, as a plain loop would give them."""
    tables = make_tables(4)
    chunks, expected = [], []
    offset = 0
    for row in data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]:
        length = data.draw(st.integers(1, MAX_LEN))
        start = data.draw(st.integers(0, length - 1))
        ids = data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        samples = data.draw(st.booleans())
        admit(tables, admission(row, ids, num_computed=start))
        chunks.append((row, start, length - start, offset, int(samples)))
        for position in range(start, length):
            block = 10 * row + position // BLOCK_SIZE
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            expected.append((ids[position], position, slot))
        offset += length - start
    inputs = StepInputs.allocate(offset, len(chunks), tables.block_table.shape[2], CPU)
    packed = torch.tensor(chunks, dtype=torch.int32).t().contiguous()
    rows_reference.prepare_prefill(tables, packed, inputs, max(c[2] for c in chunks))
    columns = (inputs.input_ids, inputs.positions, inputs.slot_mapping[0])
    got = list(zip(*(c.tolist() for c in columns), strict=True))
    assert got == expected
    assert inputs.rows.tolist() == [row if samples else -1 for row, *_, samples in chunks]
    assert inputs.seq_lens.tolist() == [start + length for _, start, length, *_ in chunks]
