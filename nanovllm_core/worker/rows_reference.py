"""Torch versions of the kernels that turn row tables into a step's inputs and its results back.

B batch entries, R rows, G cache groups, M blocks per row, T tokens. A batch entry names its row; -1
is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_core.interfaces.plan import PADDED
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import TAG_BITS, ResultRing
from nanovllm_core.worker.rows import RowTables


def scatter_updates(arena: Tensor, updates_2N: Tensor) -> None:
    """Write `updates_2N[1]` to the int32 addresses `updates_2N[0]` of the arena."""
    arena[updates_2N[0].long()] = updates_2N[1]


def prepare_decode(tables: RowTables, inputs: StepInputs) -> None:
    """Fill one token per entry from `tables.active_rows`; rows that are finished become padding."""
    rows = tables.active_rows[: inputs.num_rows]
    safe = rows.clamp(min=0).long()
    live = (rows >= 0) & (tables.finished[safe] == 0)
    position = tables.computed[safe]
    block = tables.block_table[:, safe, (position // tables.block_size).long()].long()
    inputs.rows.copy_(torch.where(live, rows, -1))
    inputs.seq_lens.copy_(torch.where(live, position + 1, 0))
    inputs.output_index.copy_(position + 1 - tables.num_prompt[safe])
    inputs.positions.copy_(torch.where(live, position, 0))
    inputs.input_ids.copy_(torch.where(live, tables.token_ids[safe, position.long()], 0))
    slots = block * tables.block_size + position % tables.block_size
    inputs.slot_mapping.copy_(torch.where(live, slots, -1))
    inputs.block_table.copy_(tables.block_table[:, safe])


def prepare_prefill(
    tables: RowTables, chunks_5S: Tensor, inputs: StepInputs, max_query_len: int
) -> None:
    """Fill the tokens of prompt chunks.

    `chunks_5S` int32: row, first position, length, where the chunk's tokens start in `inputs`, and
    whether its last token samples. Entries that do not sample get row -1. Tokens of `inputs` beyond
    the chunks' are left as they are.
    """
    del max_query_len  # the kernel's grid; here shapes say it
    row, start, length, offset, samples = chunks_5S.long()
    chunk = torch.repeat_interleave(torch.arange(row.numel(), device=row.device), length)
    index = torch.arange(chunk.numel(), device=row.device)
    position = start[chunk] + index - offset[chunk]
    token_row = row[chunk]
    block = tables.block_table[:, token_row, position // tables.block_size].long()
    num_tokens = chunk.numel()
    inputs.input_ids[:num_tokens] = tables.token_ids[token_row, position]
    inputs.positions[:num_tokens] = position
    slots = block * tables.block_size + position % tables.block_size
    inputs.slot_mapping[:, :num_tokens] = slots
    inputs.rows.copy_(torch.where(samples == 1, row, -1))
    inputs.seq_lens.copy_(start + length)
    inputs.output_index.copy_(start + length - tables.num_prompt[row])
    inputs.block_table.copy_(tables.block_table[:, row])


def finish_step(
    tables: RowTables, inputs: StepInputs, sampled_B: Tensor, results: ResultRing, skip: Tensor
) -> None:
    """Write sampled ids back to their rows, advance them, set finish flags, report to the host.

    The step's slot of `results` gets the id (`PADDED` for padding) and the flag of each entry. A
    row whose id is -1, because none was left, is finished.
    Where the flag `skip` [1] is 1 nothing happens.
    """
    if skip.item():
        return
    live = inputs.rows >= 0
    rows = inputs.rows[live].long()
    token, length = sampled_B[live], inputs.seq_lens[live]
    fits = length < tables.token_ids.shape[1]
    tables.token_ids[rows[fits], length[fits].long()] = token[fits]
    tables.computed[rows] = length
    stopped = (tables.stop_ids[rows] == token[:, None]).any(dim=1)
    stopped &= length + 1 - tables.num_prompt[rows] >= tables.min_tokens[rows]
    finished = (stopped | (token < 0) | (length + 1 >= tables.max_length[rows])).int()
    tables.finished[rows] = finished
    reported = torch.full_like(inputs.rows, (PADDED + 1) << 1)
    reported[live] = ((token + 1) << 1) | finished
    slot = int(results.num_finished) % results.words.shape[0]
    results.num_finished += 1
    tag = results.num_finished.long() & ((1 << TAG_BITS) - 1)
    results.words[slot, : inputs.num_rows] = (tag << 32) | reported
