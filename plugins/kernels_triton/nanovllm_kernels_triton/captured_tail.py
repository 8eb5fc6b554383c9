"""The captured tail: its buffers, and the launches of its kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from nanovllm_core.api import LOGPROB_COLUMNS, CapturedTail, TailTables
from nanovllm_core.kernels.device_functions import SamplingWorkspace, launch_partial
from nanovllm_kernels_triton import tail, tail_merge

TILE = 2048
MAX_SPLITS = 16
NUM_WARPS = 8
TARGET_PROGRAMS = 2048
"""More of them do not stream faster, and cost time where no row asks."""
PARTIAL_REGISTERS = 64
"""So that four programs of eight warps fit on a multiprocessor."""
MERGE_REGISTERS = 128
"""So that two do: 256 rows at once on 132 multiprocessors. What spills is of rare paths."""


class TritonTail(CapturedTail):
    """`counts` is the table of `edits`, two ids in a word: 2 bytes for each row and id.

    A split is read for a token, then for log-probabilities: the first axis of what it leaves.
    """

    def __init__(self, tables: TailTables, vocab_size: int, max_entries: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.parameters.device)

        self._tables = tables
        # Of 16 bytes a row is a whole number.
        self.counts = zeros(len(tables.parameters), -(-vocab_size // 8) * 4)
        splits = (2, max_entries, MAX_SPLITS)
        self._scores = SamplingWorkspace(max_entries, tables.parameters.device)
        self._stats = zeros(*splits, tail.NUM_STATS.value)
        self._values = zeros(*splits, tail.SLOTS.value, dtype=torch.float32)
        self._ids = zeros(*splits, tail.SLOTS.value)
        self.logprobs = zeros(max_entries, LOGPROB_COLUMNS)

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        tables, (batch, vocab_size) = self._tables, logits_BV.shape
        wanted = min(MAX_SPLITS, max(1, TARGET_PROGRAMS // batch))
        num_tiles = -(-vocab_size // (TILE * wanted))
        splits = -(-vocab_size // (TILE * num_tiles))
        choice = (logits_BV, rows_B, tables.temperature, tables.seed, output_index_B)
        plain_splits = launch_partial(
            *choice, workspace=self._scores, skip_flag=skip, asked=tables.parameters
        )
        shared = (
            *choice, num_known_B, skip, tables.parameters, tables.biases, tables.stop_ids,
            tables.min_tokens, self.counts.view(torch.int16), self._scores.scores,
            self._scores.ids, self._stats, self._values, self._ids,
        )  # fmt: skip
        constants = {
            "TILE": TILE,
            "MAX_SPLITS": MAX_SPLITS,
            "PLAIN_SPLITS": self._scores.scores.shape[1],
            # The interpreter runs no assembly.
            "APPROXIMATE": not triton.knobs.runtime.interpret,
            "num_warps": NUM_WARPS,
        }
        num_words, max_entries = self.counts.shape[1], self._stats.shape[1]
        tail.tail_partial_kernel[(batch, splits)](
            *shared, tables.num_prompt, tables.token_ids, self.counts,
            vocab_size, num_tiles, num_words, max_entries, tables.token_ids.shape[1],
            **constants, maxnreg=PARTIAL_REGISTERS,
        )  # fmt: skip
        tail_merge.tail_merge_kernel[(batch,)](
            *shared, out_B, self.logprobs, vocab_size, splits, plain_splits, num_words, max_entries,
            **constants, maxnreg=MERGE_REGISTERS,
        )  # fmt: skip

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {"counts": self.counts, "candidates": self._values, "scores": self._scores.scores}
