"""Steps with prompt chunks: the table that the device reads, their sizes, their entries."""

from __future__ import annotations

import pytest
import torch

from nanovllm_core.engine import EngineLimits
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.graphs import StepKey
from nanovllm_core.worker.mixed import (
    ChunkTable,
    MixedStep,
    aligned,
    mixed_keys,
    pack_chunks,
    rows_apart,
    trial_chunks,
)

CHUNKS = (PrefillChunk(5, 32, 7, samples=False), PrefillChunk(2, 0, 3, samples=True))


def test_a_chunk_table_says_where_each_chunk_lies_and_what_it_is() -> None:
    table = ChunkTable(torch.from_numpy(pack_chunks(CHUNKS, 2, needs_tail=False)), 2)
    assert table.query_start_loc.tolist() == [0, 7, 10]
    assert table.chunks.tolist() == [[5, 2], [32, 0], [7, 3], [0, 7], [0, 1]]
    assert table.skip_sampler.tolist() == [0]


def test_padding_of_a_chunk_table_is_chunks_of_no_token_behind_the_last() -> None:
    """They begin where the tokens end, so that no length is negative, and none samples."""
    table = ChunkTable(torch.from_numpy(pack_chunks(CHUNKS, 6, needs_tail=True)), 6)
    assert table.query_start_loc.tolist() == [0, 7, 10, 10, 10, 10, 10]
    assert table.query_start_loc.diff().tolist() == [7, 3, 0, 0, 0, 0]
    assert table.chunks[2].tolist() == [7, 3, 0, 0, 0, 0]
    assert table.chunks[4].tolist() == [0, 1, 0, 0, 0, 0]
    assert table.skip_sampler.tolist() == [1]


def test_every_part_of_a_chunk_table_begins_at_16_bytes() -> None:
    """Kernels are compiled for that alignment; another would be compiled in mid-service."""
    for num_entries in range(1, 12):
        packed = torch.from_numpy(pack_chunks(CHUNKS[:1], num_entries, needs_tail=False))
        table = ChunkTable(packed, num_entries)
        for part in (table.query_start_loc, table.chunks, table.skip_sampler):
            assert (part.data_ptr() - packed.data_ptr()) % 16 == 0
        assert table.chunks.stride(0) % 4 == 0


def test_a_count_is_aligned_to_the_next_multiple_of_16_bytes() -> None:
    assert [aligned(count) for count in range(10)] == [0, 4, 4, 4, 4, 8, 8, 8, 8, 12]


def test_fresh_inputs_are_padding() -> None:
    """No row, no key to attend to, and slots that write nothing."""
    inputs = StepInputs.allocate(3, 2, 4, torch.device("cpu"))
    assert inputs.slot_mapping.tolist() == [[-1, -1, -1]]
    assert inputs.rows.tolist() == [-1, -1]
    assert inputs.seq_lens.tolist() == inputs.output_index.tolist() == [0, 0]
    assert (inputs.input_ids.shape, inputs.positions.shape) == ((3,), (3,))
    assert (inputs.num_rows, inputs.block_table.shape) == (2, (1, 2, 4))


def test_mixed_steps_are_captured_at_all_token_sizes_beside_ever_more_rows() -> None:
    """Each number of rows is eight times the one before; the last is all of them."""
    keys = mixed_keys((128, 256), None, 256, 4096)
    assert [key.num_rows for key in keys if key.num_tokens == 128] == [8, 64, 256]
    few = mixed_keys((64,), None, 20, 4096)
    assert few == (StepKey("mixed", 64, 8), StepKey("mixed", 64, 20))
    assert mixed_keys((64,), None, 3, 4096) == (StepKey("mixed", 64, 3),)
    assert mixed_keys((), 512, 256, 4096) == ()
    assert {key.num_tokens for key in mixed_keys((64, 128), 512, 8, 4096, 500)} == {64, 128}


@pytest.mark.parametrize(
    ("full_step", "max_rows"), [(384, 256), (256, 256), (70, 20), (1024, 1000), (100, 3)]
)
def test_a_step_that_fills_a_small_budget_is_padded_to_it(full_step: int, max_rows: int) -> None:
    """Whatever part of it decodes, for the padding of these rows is taken from the prompts."""
    keys = mixed_keys((64,), full_step, max_rows, 4096)
    assert len(set(keys)) == len(keys)
    assert all(key.num_tokens <= full_step for key in keys)
    assert len(keys) - len(mixed_keys((64,), None, max_rows, 4096)) <= 17
    limits = EngineLimits(
        max_num_seqs=max_rows,
        max_num_batched_tokens=full_step,
        row_padding=rows_apart(max_rows),
        max_model_len=4096,
        num_blocks=1,
        block_size=4096,
        vocab_size=9,
    )
    for num_decode in range(max_rows):
        num_tokens = limits.prompt_budget(num_decode)
        padded = min(
            key.total_tokens
            for key in keys
            if key.num_rows >= num_decode and key.num_tokens >= num_tokens
        )
        if num_decode == 0:
            assert padded <= full_step + 8
        elif num_tokens + num_decode < full_step or num_decode % rows_apart(max_rows) == 0:
            assert padded <= full_step, num_decode


def test_a_captured_step_has_room_for_as_many_prompts_as_fill_it_with_short_ones() -> None:
    """Each takes its part of the head and of sampling, so there are no more; never above rows."""
    room = [StepKey("mixed", tokens, 256).num_chunks for tokens in (64, 128, 512, 4096, 8192)]
    assert room == [8, 8, 32, 256, 256]
    assert StepKey("mixed", 4096, 8).num_chunks == 8
    assert StepKey("mixed", 64, 3).num_chunks == 3


def test_no_mixed_step_is_larger_than_its_chunks_can_fill() -> None:
    """Two rows of 100 tokens bring 200 at most: the first size that holds these is the last."""
    sizes = [key.num_tokens for key in mixed_keys((64, 128, 256, 512), None, 2, 100)]
    assert sizes == [64, 128, 256]


def test_entries_that_get_a_token_are_reported_and_no_others() -> None:
    """Decoding rows, not their padding; chunks that sample, not the others, nor their padding."""
    inputs = StepInputs.allocate(20, 7, 1, torch.device("cpu"))
    table = ChunkTable(torch.from_numpy(pack_chunks(CHUNKS, 3, needs_tail=False)), 3)
    step = MixedStep(inputs, 4, table, max_query_len=7, max_seq_len=39)
    plan = StepPlan(num_decode=2, prefill=CHUNKS)
    assert step.reported(plan).tolist() == [0, 1, 5]
    assert step.reported(StepPlan(prefill=CHUNKS[1:])).tolist() == [4]
    assert (len(step.decode.input_ids), step.decode.num_rows) == (4, 4)
    assert (len(step.prefill.input_ids), step.prefill.num_rows) == (16, 3)


@pytest.mark.parametrize(
    ("num_tokens", "max_rows", "max_model_len", "context"),
    [
        (8192, 256, 40960, 8192),
        (512, 16, 1024, 4096),
        (8192, 16, 4096, 8192),
        (40, 4, 64, 40),
        (512, 1, 1024, 4096),
        (16, 2, 100, 4096),
        (3, 8, 2, 4096),
        (5, 8, 1, 4096),
    ],
)
def test_a_trial_s_chunks_have_the_tokens_and_the_context_that_a_step_may_have(
    num_tokens: int, max_rows: int, max_model_len: int, context: int
) -> None:
    """As much of the context as the rows can hold, and tokens, equal chunks, in the room left."""
    chunks = trial_chunks(num_tokens, max_rows, max_model_len, context)
    assert len({chunk.row for chunk in chunks}) == len(chunks) <= max_rows
    assert all(chunk.length > 0 for chunk in chunks)
    assert all(chunk.start + chunk.length <= max_model_len for chunk in chunks)
    (length,) = {chunk.length for chunk in chunks}
    before = sum(chunk.start for chunk in chunks)
    assert before >= min(context, min(max_rows, num_tokens) * (max_model_len - 1))
    assert length == min(num_tokens // len(chunks), max_model_len - chunks[0].start)


def test_a_trial_without_context_has_the_longest_chunks() -> None:
    chunks = trial_chunks(150, 4, 64, 0)
    assert [(chunk.start, chunk.length) for chunk in chunks] == [(0, 64), (0, 64), (0, 22)]
    assert sum(chunk.length for chunk in trial_chunks(500, 4, 64, 0)) == 4 * 64
    assert trial_chunks(0, 4, 64, 0) == trial_chunks(0, 4, 64, 40) == ()
