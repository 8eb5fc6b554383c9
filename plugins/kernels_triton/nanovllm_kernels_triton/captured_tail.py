"""The captured tails, of one rank and over ranks: their buffers, and launches of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from nanovllm_core.api import (
    LOGPROB_COLUMNS,
    CapturedTail,
    ShardedTail,
    TailTables,
    VocabShard,
)
from nanovllm_core.kernels import launch_options, next_power_of_2, supports_dependent_launch
from nanovllm_core.kernels.device_functions import SamplingWorkspace, launch_partial
from nanovllm_kernels_triton import tail, tail_merge, tail_parts

TILE = 2048
MAX_SPLITS = 16
NUM_WARPS = 8
TARGET_PROGRAMS = 2048
"""More of them do not stream faster, and cost time where no row asks."""
PARTIAL_REGISTERS = 64
"""So that four programs of eight warps fit on a multiprocessor."""
MERGE_REGISTERS = 128
"""So that two do: 256 rows at once on 132 multiprocessors. What spills is of rare paths."""


class Candidates:
    """The buffers and launches of the first kernel, over columns that are the ids from `first_id`.

    `counts` is the table of `edits`, two ids in a word: 2 bytes for each row and id. A split is
    read for a token, then for log-probabilities: the first axis of what it leaves.
    """

    def __init__(self, tables: TailTables, num_columns: int, max_entries: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.parameters.device)

        self._tables = tables
        self.launch_options = launch_options(supports_dependent_launch(tables.parameters.device))
        # Of 16 bytes a row is a whole number.
        self.counts = zeros(len(tables.parameters), -(-num_columns // 8) * 4)
        splits = (2, max_entries, MAX_SPLITS)
        self.scores = SamplingWorkspace(max_entries, tables.parameters.device)
        self.stats = zeros(*splits, tail.NUM_STATS.value)
        self.values = zeros(*splits, tail.SLOTS.value, dtype=torch.float32)
        self.ids = zeros(*splits, tail.SLOTS.value)

    def find(
        self,
        logits_BX: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        skip: Tensor,
        *,
        first_id: int = 0,
        num_ids: int | None = None,
        max_top_k: int = 2**31 - 1,
    ) -> tuple[tuple[Tensor, ...], dict[str, int], dict[str, Any]]:
        """Leave what each split of the logits has: see `tail.tail_partial_kernel`.

        Returns what the kernels that follow take too: tensors, numbers by name, and constants.
        """
        tables, (batch, num_columns) = self._tables, logits_BX.shape
        num_ids = num_columns if num_ids is None else num_ids
        wanted = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // batch))
        num_tiles = -(-num_columns // (TILE * wanted))
        splits = -(-num_columns // (TILE * num_tiles))
        choice = (logits_BX, rows_B, tables.temperature, tables.seed, output_index_B)
        plain_splits = launch_partial(
            *choice, workspace=self.scores, skip_flag=skip, asked=tables.parameters,
            first_id=first_id, num_ids=num_ids,
        )  # fmt: skip
        shared = (
            *choice, num_known_B, skip, tables.parameters, tables.biases, tables.stop_ids,
            tables.min_tokens, self.counts.view(torch.int16), self.scores.scores,
            self.scores.ids, self.stats, self.values, self.ids,
        )  # fmt: skip
        constants = {
            "TILE": TILE,
            "MAX_SPLITS": MAX_SPLITS,
            "PLAIN_SPLITS": self.scores.scores.shape[1],
            # The interpreter runs no assembly.
            "APPROXIMATE": not triton.knobs.runtime.interpret,
            "num_warps": NUM_WARPS,
            **self.launch_options,
        }
        numbers = {"num_words": self.counts.shape[1], "max_entries": self.stats.shape[1]}
        tail.tail_partial_kernel[(batch, splits)](
            *shared, tables.num_prompt, tables.token_ids, self.counts,
            num_columns=num_columns, FIRST_ID=first_id, num_ids=num_ids, num_tiles=num_tiles,
            max_model_len=tables.token_ids.shape[1], max_top_k=max_top_k,
            **numbers, **constants, maxnreg=PARTIAL_REGISTERS,
        )  # fmt: skip
        numbers |= {"num_splits": splits, "plain_splits": plain_splits}
        return shared, numbers, constants

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """See `CapturedTail.captured_tensors`."""
        return {"counts": self.counts, "candidates": self.values, "scores": self.scores.scores}


class TritonTail(CapturedTail):
    """Both kernels, one after the other."""

    def __init__(self, tables: TailTables, vocab_size: int, max_entries: int) -> None:
        self._candidates = Candidates(tables, vocab_size, max_entries)
        self.logprobs = self._candidates.ids.new_zeros(max_entries, LOGPROB_COLUMNS)

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        shared, numbers, constants = self._candidates.find(
            logits_BV, rows_B, num_known_B, output_index_B, skip
        )
        tail_merge.tail_merge_kernel[(len(rows_B),)](
            *shared, out_B, self.logprobs, vocab_size=logits_BV.shape[1],
            **numbers, **constants, maxnreg=MERGE_REGISTERS,
        )  # fmt: skip

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return self._candidates.captured_tensors()


class TritonShardedTail(ShardedTail):
    """The first kernel over a rank's ids, one that makes its part, and one that joins all parts."""

    max_top_k = tail.MAX_RANKED.value

    def __init__(self, tables: TailTables, shard: VocabShard, max_entries: int) -> None:
        self._tables = tables
        self._shard = shard
        self._candidates = Candidates(tables, shard.num_columns, max_entries)
        zeros = self._candidates.ids.new_zeros
        self._parts = zeros(max_entries, tail_parts.PART.value)
        self.logprobs = zeros(max_entries, LOGPROB_COLUMNS)

    def find(
        self,
        logits_BX: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        skip: Tensor,
    ) -> Tensor:
        shard, parts_BP = self._shard, self._parts[: len(rows_B)]
        shared, numbers, constants = self._candidates.find(
            logits_BX, rows_B, num_known_B, output_index_B, skip,
            first_id=shard.first_id, num_ids=shard.num_ids, max_top_k=self.max_top_k,
        )  # fmt: skip
        tail_parts.make_part_kernel[(len(rows_B),)](
            *shared, parts_BP, num_columns=shard.num_columns, num_ids=shard.num_ids,
            FIRST_ID=shard.first_id, **numbers, **constants, maxnreg=MERGE_REGISTERS,
        )  # fmt: skip
        return parts_BP

    def choose(
        self,
        parts_NBP: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        tables, num_ranks = self._tables, len(parts_NBP)
        tail_parts.join_parts_kernel[(len(rows_B),)](
            parts_NBP, rows_B, tables.temperature, tables.seed, output_index_B, num_known_B, skip,
            tables.parameters, out_B, self.logprobs, parts_NBP.stride(0),
            RANKS=num_ranks, BLOCK_RANKS=next_power_of_2(num_ranks),
            APPROXIMATE=not triton.knobs.runtime.interpret, num_warps=NUM_WARPS,
            **self._candidates.launch_options,
        )  # fmt: skip

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {**self._candidates.captured_tensors(), "parts": self._parts}
