"""The device tensors of one step, built from the row tables and never seen by the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import DecodeMetadata

_ALIGNED = 4
"""int32 elements in 16 bytes: kernels are compiled for addresses of that alignment."""


def aligned(count: int) -> int:
    """`count` int32 elements and as many more as an aligned address after them needs."""
    return -(-count // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T query tokens of B batch entries: decode entries bring one token, prefill chunks many.

    Each of the G cache groups has its own slots and block tables.

    `seq_lens` counts the keys an entry attends to, 0 for padding; `rows` is -1 for entries that
    get no token; `output_index` is the number of the token to be sampled, 0 for the first output.
    """

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [G, T] int64, -1 writes nothing
    rows: Tensor  # [B] int32
    seq_lens: Tensor  # [B] int32
    output_index: Tensor  # [B] int32
    block_table: Tensor  # [G, B, M] int32

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        num_rows: int,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> StepInputs:
        """Padding alone. What each group has begins at an aligned address."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        slots = torch.full((num_groups, aligned(num_tokens)), -1, device=device)
        return cls(
            input_ids=ints(num_tokens),
            positions=ints(num_tokens),
            slot_mapping=slots[:, :num_tokens],
            rows=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            seq_lens=ints(num_rows),
            output_index=ints(num_rows),
            block_table=ints(num_groups, aligned(num_rows), max_blocks)[:, :num_rows],
        )

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    def slice(self, tokens: slice, rows: slice) -> StepInputs:
        """The same memory, narrowed to some tokens and some entries."""
        return StepInputs(
            input_ids=self.input_ids[tokens],
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[:, tokens],
            rows=self.rows[rows],
            seq_lens=self.seq_lens[rows],
            output_index=self.output_index[rows],
            block_table=self.block_table[:, rows],
        )

    def decode_metadata(self, max_seq_len: int) -> list[DecodeMetadata]:
        """The entries as decode rows, for each cache group."""
        return [
            DecodeMetadata(block_table, self.seq_lens, max_seq_len)
            for block_table in self.block_table.unbind()
        ]
