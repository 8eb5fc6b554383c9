"""Triton versions of `rows_reference`: the same functions, one kernel each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_core.kernels.dependent_launch import launch_options, supports_dependent_launch
from nanovllm_core.kernels.sampling_triton import take_turn
from nanovllm_core.kernels.sizes import cdiv
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import TAG_BITS, ResultRing
from nanovllm_core.worker.rows import RowTables

_BLOCK = 256


@triton.jit(do_not_specialize=["num_updates"])
def _scatter_kernel(arena, updates, num_updates, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_updates
    address = tl.load(updates + i, mask=mask)
    value = tl.load(updates + num_updates + i, mask=mask)
    tl.store(arena + address, value, mask=mask)


def scatter_updates(arena: Tensor, updates_2N: Tensor) -> None:
    """See `rows_reference.scatter_updates`."""
    num_updates = updates_2N.shape[1]
    _scatter_kernel[(cdiv(num_updates, _BLOCK),)](arena, updates_2N, num_updates, BLOCK=_BLOCK)


@triton.jit
def _copy_blocks(source, target, num_blocks, BLOCK: tl.constexpr):
    for start in range(0, num_blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_blocks
        tl.store(target + i, tl.load(source + i, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["slots_stride", "out_table_stride"])
def _prepare_decode_kernel(
    active_rows, finished, computed, num_prompt, token_ids, block_table,
    out_ids, out_positions, out_slots, out_rows, out_seq_lens, out_index, out_block_table,
    max_model_len, max_blocks, table_stride, slots_stride, out_table_stride,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per entry. The strides are from group to group; of one group none counts."""
    take_turn(DEPENDENT)
    i = tl.program_id(0)
    row = tl.load(active_rows + i)
    safe = tl.maximum(row, 0).to(tl.int64)
    live = (row >= 0) & (tl.load(finished + safe) == 0)
    position = tl.load(computed + safe)
    token = tl.load(token_ids + safe * max_model_len + position, mask=live, other=0)
    for group in tl.static_range(GROUPS):
        entry = group * table_stride + safe * max_blocks + position // BLOCK_SIZE
        block = tl.load(block_table + entry, mask=live, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out_slots + group * slots_stride + i, tl.where(live, slot, -1))
    tl.store(out_ids + i, token)
    tl.store(out_positions + i, tl.where(live, position, 0))
    tl.store(out_rows + i, tl.where(live, row, -1))
    tl.store(out_seq_lens + i, tl.where(live, position + 1, 0))
    tl.store(out_index + i, position + 1 - tl.load(num_prompt + safe))
    num_blocks = tl.where(live, position // BLOCK_SIZE + 1, 0)
    for group in tl.static_range(GROUPS):
        _copy_blocks(
            block_table + group * table_stride + safe * max_blocks,
            out_block_table + group * out_table_stride + i.to(tl.int64) * max_blocks,
            num_blocks, BLOCK,
        )  # fmt: skip


def prepare_decode(tables: RowTables, inputs: StepInputs) -> None:
    """See `rows_reference.prepare_decode`; block-table entries beyond a row's length stay stale."""
    _prepare_decode_kernel[(inputs.num_rows,)](
        tables.active_rows, tables.finished, tables.computed, tables.num_prompt,
        tables.token_ids, tables.block_table,
        inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.rows,
        inputs.seq_lens, inputs.output_index, inputs.block_table,
        tables.token_ids.shape[1], tables.block_table.shape[2], *_group_strides(tables, inputs),
        GROUPS=tables.block_table.shape[0], BLOCK_SIZE=tables.block_size, BLOCK=_BLOCK,
        num_warps=2, **launch_options(supports_dependent_launch(tables.computed.device)),
    )  # fmt: skip


def _group_strides(tables: RowTables, inputs: StepInputs) -> tuple[int, int, int]:
    """From group to group, in elements: block tables, the step's slots, the step's block tables."""
    return tables.block_table.stride(0), inputs.slot_mapping.stride(0), inputs.block_table.stride(0)


@triton.jit(do_not_specialize=["chunk_stride", "slots_stride", "out_table_stride"])
def _prepare_prefill_kernel(
    chunks, chunk_stride, num_prompt, token_ids, block_table,
    out_ids, out_positions, out_slots, out_rows, out_seq_lens, out_index, out_block_table,
    max_model_len, max_blocks, table_stride, slots_stride, out_table_stride,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunks + chunk).to(tl.int64)
    start = tl.load(chunks + chunk_stride + chunk)
    length = tl.load(chunks + 2 * chunk_stride + chunk)
    offset = tl.load(chunks + 3 * chunk_stride + chunk)
    samples = tl.load(chunks + 4 * chunk_stride + chunk)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    mask = i < length
    position = start + i
    token = tl.load(token_ids + row * max_model_len + position, mask=mask)
    tl.store(out_ids + offset + i, token, mask=mask)
    tl.store(out_positions + offset + i, position, mask=mask)
    seq_len = start + length
    for group in tl.static_range(GROUPS):
        source = block_table + group * table_stride + row * max_blocks
        block = tl.load(source + position // BLOCK_SIZE, mask=mask)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out_slots + group * slots_stride + offset + i, slot, mask=mask)
        if tile == 0:
            target = out_block_table + group * out_table_stride + chunk.to(tl.int64) * max_blocks
            _copy_blocks(source, target, tl.cdiv(seq_len, BLOCK_SIZE), BLOCK)
    if tile == 0:
        tl.store(out_rows + chunk, tl.where(samples == 1, row, -1).to(tl.int32))
        tl.store(out_seq_lens + chunk, seq_len)
        tl.store(out_index + chunk, seq_len - tl.load(num_prompt + row))


def prepare_prefill(
    tables: RowTables, chunks_5S: Tensor, inputs: StepInputs, max_query_len: int
) -> None:
    """See `rows_reference.prepare_prefill`."""
    num_chunks = chunks_5S.shape[1]
    _prepare_prefill_kernel[(num_chunks, cdiv(max_query_len, _BLOCK))](
        chunks_5S, chunks_5S.stride(0), tables.num_prompt, tables.token_ids, tables.block_table,
        inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.rows,
        inputs.seq_lens, inputs.output_index, inputs.block_table,
        tables.token_ids.shape[1], tables.block_table.shape[2], *_group_strides(tables, inputs),
        GROUPS=tables.block_table.shape[0], BLOCK_SIZE=tables.block_size, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _finish_step_kernel(
    skip, rows, seq_lens, sampled, token_ids, computed, num_prompt, max_length, min_tokens,
    finished, stop_ids, words, num_finished, num_rows, num_slots, max_rows, max_model_len,
    NUM_STOP_IDS: tl.constexpr, TAG_MASK: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for all entries, so that one store counts the step."""
    take_turn(DEPENDENT)
    if tl.load(skip) != 0:
        return
    step = tl.load(num_finished)
    tag = ((step + 1) & TAG_MASK) << 32
    slot = words + (step % num_slots) * max_rows
    for start in range(0, num_rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_rows
        row = tl.load(rows + i, mask=mask, other=-1)
        live = row >= 0
        token = tl.load(sampled + i, mask=live, other=-1)
        length = tl.load(seq_lens + i, mask=live, other=0)
        fits = live & (length < max_model_len)
        tl.store(token_ids + row.to(tl.int64) * max_model_len + length, token, mask=fits)
        tl.store(computed + row, length, mask=live)
        stops = row[:, None] * NUM_STOP_IDS + tl.arange(0, NUM_STOP_IDS)[None, :]
        stops = tl.load(stop_ids + stops, mask=live[:, None], other=-1)
        stopped = tl.sum((stops == token[:, None]).to(tl.int32), axis=1) > 0
        num_outputs = length + 1 - tl.load(num_prompt + row, mask=live, other=0)
        stopped = stopped & (num_outputs >= tl.load(min_tokens + row, mask=live, other=0))
        at_end = length + 1 >= tl.load(max_length + row, mask=live, other=0)
        ended = (live & (stopped | at_end | (token < 0))).to(tl.int32)
        tl.store(finished + row, ended, mask=live)
        tl.store(slot + i, tag | (((token + 1) << 1) | ended).to(tl.int64), mask=mask)
    tl.debug_barrier()  # no warp may still read the count
    tl.store(num_finished, step + 1)


def finish_step(
    tables: RowTables, inputs: StepInputs, sampled_B: Tensor, results: ResultRing, skip: Tensor
) -> None:
    """See `rows_reference.finish_step`."""
    num_slots, max_rows = results.words.shape
    _finish_step_kernel[(1,)](
        skip, inputs.rows, inputs.seq_lens, sampled_B, tables.token_ids, tables.computed,
        tables.num_prompt, tables.max_length, tables.min_tokens, tables.finished,
        tables.stop_ids, results.words, results.num_finished, inputs.num_rows, num_slots, max_rows,
        tables.token_ids.shape[1],
        NUM_STOP_IDS=tables.stop_ids.shape[1], TAG_MASK=(1 << TAG_BITS) - 1, BLOCK=_BLOCK,
        num_warps=8, **launch_options(supports_dependent_launch(tables.computed.device)),
    )  # fmt: skip
