"""The sampler's tail inside the captured step: what most rows ask for costs the host nothing.

Parameters are in the row tables, so that there is no graph per combination; kernels find there
which rows ask. It does what `sampler_tail` does, but for processors, masks and more than the tables
hold; and it chooses as the built-in sampler does, so other samplers have the eager tail alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.kernels import sampling_triton, tail_triton as kernels
from nanovllm_core.kernels.tail_parameters import MAX_TOP
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.captured_sampler import CapturedSampler
from nanovllm_core.worker.logprobs import LogprobTensors
from nanovllm_core.worker.row_parameters import is_captured
from nanovllm_core.worker.rows import RowTables

TILE = 2048
MAX_SPLITS = 16
NUM_WARPS = 8
PARTIAL_REGISTERS = 64
"""So that four programs of eight warps fit on a multiprocessor."""
MERGE_REGISTERS = 128
"""So that two do: 256 rows at once on 132 multiprocessors. What spills is of rare paths."""


class CapturedTail(CapturedSampler):
    """The tail's kernels and their buffers.

    `counts` is the table of `edits_triton`, two ids in a word: 2 bytes for each row and id. A split
    is read for a token, then for log-probabilities: the first axis of what it leaves.
    """

    def __init__(self, tables: RowTables, vocab_size: int, max_entries: int) -> None:
        device, num_rows = tables.arena.device, len(tables.computed)
        self._row_tables = tables

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Of 16 bytes a row is a whole number.
        self.counts = zeros(num_rows, -(-vocab_size // 8) * 4)
        splits = (2, max_entries, MAX_SPLITS)
        slots: int = kernels.SLOTS.value
        self._scores = sampling_triton.SamplingWorkspace(max_entries, device)
        self._stats = zeros(*splits, kernels.NUM_STATS.value)
        self._values = zeros(*splits, slots, dtype=torch.float32)
        self._ids = zeros(*splits, slots)
        self._token_logprobs = zeros(max_entries, dtype=torch.float32)
        self._top_logprobs = zeros(max_entries, MAX_TOP, dtype=torch.float32)
        self._top_ids = zeros(max_entries, MAX_TOP)
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows + 1, -1, np.int32)
        """By row, -1 where it asks for no log-probabilities; the last is that of padding."""

    def admit(self, row: int, sampling: RowSampling) -> bool:
        asked = sampling.logprobs
        self._num_top[row] = -1 if asked is None else min(asked, self._vocab_size)
        return not is_captured(sampling)

    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        tables, (batch, vocab_size) = self._row_tables, logits_BV.shape
        num_tiles = -(-vocab_size // (TILE * MAX_SPLITS))
        splits = -(-vocab_size // (TILE * num_tiles))
        choice = (logits_BV, inputs.rows, tables.temperature, tables.seed, inputs.output_index)
        plain_splits = sampling_triton.launch_partial(
            *choice, workspace=self._scores, skip_flag=skip, asked=tables.parameters
        )
        shared = (
            *choice, inputs.seq_lens, skip, tables.parameters, tables.biases, tables.stop_ids,
            tables.min_tokens, self.counts.view(torch.int16), self._scores.scores,
            self._scores.ids, self._stats, self._values, self._ids,
        )  # fmt: skip
        constants = {
            "TILE": TILE,
            "MAX_SPLITS": MAX_SPLITS,
            "PLAIN_SPLITS": sampling_triton.MAX_SPLITS,
            "NUM_STOP_IDS": tables.stop_ids.shape[1],
            # The interpreter runs no assembly.
            "APPROXIMATE": not triton.knobs.runtime.interpret,
            "num_warps": NUM_WARPS,
        }
        num_words, max_entries = self.counts.shape[1], self._stats.shape[1]
        kernels.tail_partial_kernel[(batch, splits, 2)](
            *shared, tables.num_prompt, tables.token_ids, self.counts,
            vocab_size, num_tiles, num_words, max_entries, tables.token_ids.shape[1],
            **constants, maxnreg=PARTIAL_REGISTERS,
        )  # fmt: skip
        kernels.tail_merge_kernel[(batch,)](
            *shared, out_B, self._token_logprobs, self._top_logprobs, self._top_ids,
            vocab_size, splits, plain_splits, num_words, max_entries,
            **constants, maxnreg=MERGE_REGISTERS,
        )  # fmt: skip

    def logprobs(self, rows: NDArray[np.int32]) -> LogprobTensors | None:
        num_top = self._num_top[rows]
        entries = np.flatnonzero(num_top >= 0)
        if not entries.size:
            return None
        asked, n = tuple(entries.tolist()), len(rows)
        return LogprobTensors(
            asked,
            tuple(num_top[entries].tolist()),
            asked,
            self._token_logprobs[:n],
            self._top_logprobs[:n],
            self._top_ids[:n],
        )

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return {"counts": self.counts, "candidates": self._values, "scores": self._scores.scores}
