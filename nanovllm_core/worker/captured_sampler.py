"""The part of sampling that a captured step does: all of it, but for what needs the eager tail."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.logprobs import LogprobTensors
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler import GumbelSampler


class CapturedSampler:
    """The sampler's own choice: rows that ask for more than its contract need the eager tail."""

    def __init__(self, sampler: Sampler, tables: RowTables) -> None:
        self._sampler = sampler
        self._row_tables = tables

    def admit(self, row: int, sampling: RowSampling) -> bool:
        """A row is given to a request that asks for this. Returns if it needs the eager tail."""
        return sampling.needs_tail

    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        """Choose a token per entry into `out_B` (int32), unless the flag `skip` [1] is 1."""
        tables, index_B = self._row_tables, inputs.output_index
        self._sampler.sample(
            logits_BV, inputs.rows, tables.temperature, tables.seed, index_B, out_B, skip
        )

    def logprobs(self, rows: NDArray[np.int32]) -> LogprobTensors | None:
        """Those of the last step, of entries that are these rows (-1: padding); None: none asked.

        Its tensors are the same in every step.
        """
        return None

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tensors that captured calls use, but for the row tables, by name."""
        return self._sampler.captured_tensors()


def make_captured_sampler(
    sampler: Sampler, tables: RowTables, vocab_size: int, max_entries: int
) -> CapturedSampler:
    """With the tail, where the choice is the built-in sampler's on CUDA: its kernels make it."""
    if type(sampler) is not GumbelSampler or tables.arena.device.type != "cuda":
        return CapturedSampler(sampler, tables)
    from nanovllm_core.worker.captured_tail import CapturedTail  # which imports Triton

    return CapturedTail(tables, vocab_size, max_entries)
