"""The sampler's tail inside the captured step: what most rows ask for costs the host nothing.

Parameters are in the row tables, so that there is no graph per combination; kernels find there
which rows ask. It does what `sampler_tail` does, but for processors, masks and more than the tables
hold; and it chooses as the built-in sampler does, so other samplers have the eager tail alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.kernels import tail_triton
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler_tail import LogprobTensors


class CapturedTail:
    """The tail's buffers: a count table of 2 bytes for each row and id, and a workspace."""

    def __init__(self, tables: RowTables, vocab_size: int, max_entries: int) -> None:
        device, num_rows = tables.arena.device, len(tables.computed)
        words = tail_triton.count_words(vocab_size)
        self._workspace = tail_triton.TailWorkspace(max_entries, device)
        self._tables = tail_triton.TailTables(
            parameters=tables.parameters,
            biases=tables.biases,
            stop_ids=tables.stop_ids,
            min_tokens=tables.min_tokens,
            num_prompt=tables.num_prompt,
            token_ids=tables.token_ids,
            counts=torch.zeros(num_rows, words, dtype=torch.int32, device=device),
            temperature=tables.temperature,
            seed=tables.seed,
        )
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows + 1, -1, np.int32)
        """By row, -1 where it asks for no log-probabilities; the last is that of padding."""

    def admit(self, row: int, sampling: RowSampling) -> None:
        """A row is given to a request that asks for this."""
        asked = sampling.logprobs
        self._num_top[row] = -1 if asked is None else min(asked, self._vocab_size)

    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        """Choose a token per entry into `out_B` (int32), unless the flag `skip` [1] is 1."""
        tail_triton.sample_asked(
            logits_BV,
            inputs.rows,
            inputs.seq_lens,
            inputs.output_index,
            out_B,
            tables=self._tables,
            workspace=self._workspace,
            skip_flag=skip,
        )

    def logprobs(self, rows: NDArray[np.int32]) -> LogprobTensors | None:
        """Those of the step launched last, where entry i is row `rows[i]`; None if none asked."""
        num_top = self._num_top[rows]
        entries = np.flatnonzero(num_top >= 0)
        if not entries.size:
            return None
        workspace, asked = self._workspace, tuple(entries.tolist())
        columns = (workspace.token_logprobs, workspace.top_logprobs, workspace.top_ids)
        of_entries = (column[: len(rows)] for column in columns)
        return LogprobTensors(asked, tuple(num_top[entries].tolist()), *of_entries, asked)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tail's own tensors that captured calls use, by name."""
        return {"counts": self._tables.counts, "candidates": self._workspace.values}
