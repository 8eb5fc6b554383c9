"""A step's inputs and tables for calls of the eager tail."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.rows import RowTables


def tail_step(
    rows_B: Tensor,
    num_known_B: Tensor,
    output_index_B: Tensor,
    token_ids_RL: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
) -> tuple[StepInputs, RowTables]:
    """The entries `rows_B` of tables that hold these ids, temperatures and seeds."""
    device, num_rows, length = rows_B.device, *token_ids_RL.shape
    tables = RowTables.allocate(num_rows, length, 16, device)
    tables.token_ids.copy_(token_ids_RL)
    tables.temperature.copy_(temperature_R)
    tables.seed.copy_(seed_R)
    inputs = StepInputs.allocate(len(rows_B), len(rows_B), 1, device)
    for own, given in (
        (inputs.rows, rows_B),
        (inputs.seq_lens, num_known_B),
        (inputs.output_index, output_index_B),
    ):
        own.copy_(given)
    return inputs, tables


def ints(size: int, value: int, device: torch.device) -> Tensor:
    """int32 [size] of one value."""
    return torch.full((size,), value, dtype=torch.int32, device=device)
