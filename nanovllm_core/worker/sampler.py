"""The built-in sampler, and the part of sampling that is captured in a step.

What that part does not cover needs the eager tail (see `sampler_tail`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.interfaces.tail import CapturedTail, TailKernels, TailTables
from nanovllm_core.kernels.sampling_reference import sample_tokens
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import LogprobTensors
from nanovllm_core.worker.rows import RowTables, is_captured


class GumbelSampler(Sampler):
    """Greedy and temperature by the Gumbel-max trick, on any device.

    One pass over the logits on CUDA, the torch reference elsewhere; both give the same ids.

    `kernels.sampling_reference` is the definition.
    """

    def __init__(self, options: BaseModel, context: SamplerContext) -> None:
        super().__init__(options, context)
        self._workspace = None
        if context.device.type == "cuda":
            from nanovllm_core.kernels import sampling_triton

            self._workspace = sampling_triton.SamplingWorkspace(context.max_entries, context.device)
            self._launch = partial(sampling_triton.sample_tokens, workspace=self._workspace)

    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        arguments = (logits_BV, rows_B, temperature_R, seed_R, output_index_B, out_B)
        if self._workspace is not None:
            self._launch(*arguments, skip_flag=skip)
        elif not skip.item():  # on a CPU the host waits for nothing
            sample_tokens(*arguments)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        if self._workspace is None:
            return {}
        return {"scores": self._workspace.scores, "ids": self._workspace.ids}


class CapturedSampler:
    """The sampler's own choice: rows that ask for more than its contract need the eager tail."""

    def __init__(self, sampler: Sampler, tables: RowTables) -> None:
        self._sampler = sampler
        self._tables = tables

    def needs_tail(self, sampling: RowSampling) -> bool:
        """True where it does not do all that a row asks for."""
        return sampling.needs_tail

    def admit(self, row: int, sampling: RowSampling) -> None:
        """A row is given to a request that asks for this."""

    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        """Choose a token per entry into `out_B` (int32), unless the flag `skip` [1] is 1."""
        tables, index_B = self._tables, inputs.output_index
        self._sampler.sample(
            logits_BV, inputs.rows, tables.temperature, tables.seed, index_B, out_B, skip
        )

    def logprobs(self, rows: NDArray[np.int32]) -> Sequence[LogprobTensors]:
        """What it leaves of entries that are these rows (-1: padding); none if none asked.

        The tensors are the same in every step.
        """
        return ()

    def largest(self, logits_BV: Tensor) -> Tensor:
        """The largest logit of each entry [B], NaN where one is."""
        return logits_BV.amax(dim=1)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tensors that captured calls use, but for the row tables, by name."""
        return self._sampler.captured_tensors()


class LogprobReports:
    """Which rows get log-probabilities of a captured tail, and how many."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows + 1, -1, np.int32)
        """By row, -1 where it asks for none; the last is that of padding."""

    def admit(self, row: int, asked: int | None) -> None:
        """A row is given to a request that asks the tail for so many, or for none at all."""
        self._num_top[row] = -1 if asked is None else min(asked, self._vocab_size)

    def of(self, rows: NDArray[np.int32], packed: Tensor) -> Sequence[LogprobTensors]:
        """Those of entries that are these rows, of a tail's `logprobs`."""
        num_top = self._num_top[rows]
        entries = np.flatnonzero(num_top >= 0)
        if not entries.size:
            return ()
        asked = entries.tolist()
        return (LogprobTensors(asked, num_top[entries].tolist(), asked, packed[: len(rows)]),)


class TailSampler(CapturedSampler):
    """The kernel set's tail, which chooses as the built-in sampler does."""

    def __init__(self, tail: CapturedTail, num_rows: int, vocab_size: int) -> None:
        self._tail = tail
        self._reports = LogprobReports(num_rows, vocab_size)

    def needs_tail(self, sampling: RowSampling) -> bool:
        return not is_captured(sampling)

    def admit(self, row: int, sampling: RowSampling) -> None:
        self._reports.admit(row, None if self.needs_tail(sampling) else sampling.logprobs)

    def sample(self, logits_BV: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        num_known_B, index_B = inputs.seq_lens, inputs.output_index
        self._tail.sample(logits_BV, inputs.rows, num_known_B, index_B, out_B, skip)

    def logprobs(self, rows: NDArray[np.int32]) -> Sequence[LogprobTensors]:
        return self._reports.of(rows, self._tail.logprobs)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return self._tail.captured_tensors()


def make_captured_sampler(
    kernels: KernelSet, sampler: Sampler, tables: RowTables, vocab_size: int, max_entries: int
) -> CapturedSampler:
    """With the kernel set's tail, where it has one and the sampler is the built-in one on CUDA."""
    on_cuda = tables.arena.device.type == "cuda"
    if not (on_cuda and type(sampler) is GumbelSampler and isinstance(kernels, TailKernels)):
        return CapturedSampler(sampler, tables)
    tail = kernels.make_tail(tail_tables(tables), vocab_size, max_entries)
    return TailSampler(tail, len(tables.computed), vocab_size)


def tail_tables(tables: RowTables) -> TailTables:
    """The part of the row tables that a tail reads, and of which it writes one column."""
    return TailTables(**{one.name: getattr(tables, one.name) for one in fields(TailTables)})
