"""Sampling where each rank has the logits of its own part of the vocabulary.

The noise of an id depends on no other id. So each rank scores its own ids, and the best of all
ranks wins: greedy and temperature need two 32-bit numbers of each entry and rank, and no logits.
Where the kernel set has a `ShardedTail`, it does what the tables say of a row, of about a thousand
bytes of each entry and rank. What is left comes after the step: the logits of rows that ask for it,
and no others, are gathered on every rank, and the samplers of one rank choose from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import UnsupportedError
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import vocab_per_rank
from nanovllm_core.interfaces.parallel import TensorParallel
from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.interfaces.tail import ShardedTail, ShardedTailKernels, VocabShard
from nanovllm_core.kernels import sampling_reference
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.results import LogprobTensors
from nanovllm_core.worker.rows import RowTables, is_captured
from nanovllm_core.worker.sampler import (
    CapturedSampler,
    GumbelSampler,
    LogprobReports,
    TailSampler,
    tail_tables,
)
from nanovllm_core.worker.sampler_tail import NOTHING_ASKED, SamplerTail, to_device


class _OverRanks(CapturedSampler):
    """Logits have the columns of a `VocabShard`; `whole` is the sampler of gathered rows."""

    def __init__(self, tp: TensorParallel, whole: CapturedSampler, shard: VocabShard) -> None:
        self._tp = tp
        self._whole = whole
        self._shard = shard

    def admit(self, row: int, sampling: RowSampling) -> None:
        self._whole.admit(row, sampling)

    def largest(self, logits_BX: Tensor) -> Tensor:
        shard = self._shard
        is_padding_X = torch.arange(shard.num_columns, device=logits_BX.device) >= shard.num_ids
        own_B1 = logits_BX.float().masked_fill(is_padding_X, -torch.inf).amax(dim=1, keepdim=True)
        return self._tp.all_gather(own_B1).amax(dim=1)

    def _check_columns(self, logits_BX: Tensor) -> None:
        if logits_BX.shape[1] != self._shard.num_columns:
            raise UnsupportedError(
                f"compute_logits() gave {logits_BX.shape[1]} columns for an out_TV that has "
                f"{self._shard.num_columns}, those of one of {self._tp.size} ranks; correct the "
                "model plugin, or use ParallelLMHead there"
            )


class ShardedSampler(_OverRanks):
    """Greedy and temperature as the built-in sampler does."""

    def __init__(
        self,
        tp: TensorParallel,
        whole: CapturedSampler,
        shard: VocabShard,
        tables: RowTables,
        max_entries: int,
    ) -> None:
        super().__init__(tp, whole, shard)
        self._tables = tables
        self._workspace = None
        device = tables.arena.device
        self._pairs = torch.zeros((max_entries, 2), dtype=torch.int32, device=device)
        if device.type == "cuda":
            from nanovllm_core.kernels import sampling_triton

            self._workspace = sampling_triton.SamplingWorkspace(max_entries, device)
            self._kernels = sampling_triton

    def needs_tail(self, sampling: RowSampling) -> bool:
        return sampling.needs_tail

    def sample(self, logits_BX: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        self._check_columns(logits_BX)
        tables, rows_B = self._tables, inputs.rows
        choice = (logits_BX, rows_B, tables.temperature, tables.seed, inputs.output_index)
        ids = (self._shard.first_id, self._shard.num_ids)
        if self._workspace is not None:
            pairs_B2, kernels = self._pairs[: len(rows_B)], self._kernels
            kernels.best_pairs(*choice, *ids, pairs_B2, workspace=self._workspace, skip_flag=skip)
            kernels.choose_pair(self._tp.all_gather(pairs_B2), rows_B, out_B, skip_flag=skip)
        elif not skip.item():  # it is the same on all ranks
            pairs_B2 = sampling_reference.best_pairs(*choice, *ids)
            sampling_reference.choose_pair(self._tp.all_gather(pairs_B2), rows_B, out_B)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        if self._workspace is None:
            return {}
        return {"pairs": self._pairs, "scores": self._workspace.scores, "ids": self._workspace.ids}


class ShardedTailSampler(_OverRanks):
    """The kernel set's tail over ranks, and all that it can do of what rows ask for."""

    def __init__(
        self,
        tp: TensorParallel,
        whole: CapturedSampler,
        shard: VocabShard,
        tail: ShardedTail,
        reports: LogprobReports,
    ) -> None:
        super().__init__(tp, whole, shard)
        self._tail = tail
        self._reports = reports

    def needs_tail(self, sampling: RowSampling) -> bool:
        in_reach = not sampling.is_cut or 0 < sampling.top_k <= self._tail.max_top_k
        return not (is_captured(sampling) and in_reach)

    def admit(self, row: int, sampling: RowSampling) -> None:
        super().admit(row, sampling)
        self._reports.admit(row, None if self.needs_tail(sampling) else sampling.logprobs)

    def sample(self, logits_BX: Tensor, inputs: StepInputs, out_B: Tensor, skip: Tensor) -> None:
        self._check_columns(logits_BX)
        entries = (inputs.rows, inputs.seq_lens, inputs.output_index)
        parts_BP = self._tail.find(logits_BX, *entries, skip)
        # Flat, ranks come one behind the other, and no kernel has to bring them side by side.
        parts_NBP = self._tp.all_gather(parts_BP.flatten()).view(-1, *parts_BP.shape)
        self._tail.choose(parts_NBP, *entries, out_B, skip)

    def logprobs(self, rows: NDArray[np.int32]) -> Sequence[LogprobTensors]:
        return self._reports.of(rows, self._tail.logprobs)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        return self._tail.captured_tensors()


class GatheringTail:
    """The tail over ranks: both samplers of one rank, on the gathered logits of the rows that ask.

    It is called as a `SamplerTail` is. `whole` is what captures of one rank hold, here launched
    after the step; `tail` does what that leaves.
    """

    def __init__(
        self,
        tp: TensorParallel,
        whole: CapturedSampler,
        tail: SamplerTail,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._tp = tp
        self._whole = whole
        self._tail = tail
        self._vocab_size = vocab_size
        self._device = device
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        self._params: Sequence[RowSampling] = ()
        self._rows: Sequence[int] = ()
        self._entries: list[int] = []
        self._entries_S = torch.zeros(0, dtype=torch.int64, device=device)
        self._asking_rows = np.zeros(0, np.int32)
        self._of_tail: tuple[tuple[int, ...], tuple[RowSampling, ...]] = ((), ())
        """Rows that ask, and what of it `tail` does: the same objects while both stay the same."""

    def plan(self, rows: Sequence[int], params: Sequence[RowSampling], max_model_len: int) -> None:
        """Note the entries that ask, and upload where they are."""
        self._entries = [i for i, one in enumerate(params) if one.needs_tail]
        self._entries_S = to_device(np.array(self._entries, np.int64), self._device)
        self._asking_rows = np.array([rows[i] for i in self._entries], np.int32)
        left = (params[i] for i in self._entries)
        self._of_tail = (
            tuple(self._asking_rows.tolist()),
            tuple(one if self._whole.needs_tail(one) else NOTHING_ASKED for one in left),
        )
        self._tail.plan(*self._of_tail, max_model_len)
        self._params, self._rows = params, rows

    def __call__(
        self,
        logits_BX: Tensor,
        rows: Sequence[int],
        params: Sequence[RowSampling],
        inputs: StepInputs,
        tables: RowTables,
        out_B: Tensor,
    ) -> Sequence[LogprobTensors]:
        """As `SamplerTail.__call__`. On every rank the rows that ask are the same."""
        if params is not self._params or rows is not self._rows:
            self.plan(rows, params, tables.token_ids.shape[1])
        entries_S = self._entries_S
        gathered_SX = self._tp.all_gather(logits_BX[entries_S])
        logits_SV = gathered_SX[:, : self._vocab_size].contiguous()
        asking = replace(
            inputs,
            rows=inputs.rows[entries_S],
            seq_lens=inputs.seq_lens[entries_S],
            output_index=inputs.output_index[entries_S],
        )
        out_S = torch.empty_like(asking.rows)
        self._whole.sample(logits_SV, asking, out_S, self._never)
        logprobs = [
            *self._whole.logprobs(self._asking_rows),
            *self._tail(logits_SV, *self._of_tail, asking, tables, out_S),
        ]
        out_B.index_copy_(0, entries_S, out_S)
        return [
            replace(part, entries=[self._entries[i] for i in part.entries]) for part in logprobs
        ]


def over_ranks(
    tp: TensorParallel,
    kernels: KernelSet,
    sampler: Sampler,
    captured: CapturedSampler,
    tail: SamplerTail,
    tables: RowTables,
    vocab_size: int,
    max_entries: int,
) -> tuple[CapturedSampler, SamplerTail | GatheringTail, int]:
    """What samples on each of these ranks, and the columns of the logits that they have.

    A plugin's sampler is promised whole logits, which the model then gathers in every step.
    """
    if tp.size == 1 or type(sampler) is not GumbelSampler:
        return captured, tail, vocab_size
    num_columns = vocab_per_rank(vocab_size, tp.size)
    first_id = tp.rank * num_columns
    shard = VocabShard(
        first_id=first_id,
        num_ids=min(max(vocab_size - first_id, 0), num_columns),
        num_columns=num_columns,
    )
    sharded: CapturedSampler
    if isinstance(captured, TailSampler) and isinstance(kernels, ShardedTailKernels):
        its_tail = kernels.make_sharded_tail(tail_tables(tables), shard, max_entries)
        reports = LogprobReports(len(tables.computed), vocab_size)
        sharded = ShardedTailSampler(tp, captured, shard, its_tail, reports)
    else:
        sharded = ShardedSampler(tp, captured, shard, tables, max_entries)
    gathering = GatheringTail(tp, captured, tail, vocab_size, tables.arena.device)
    return sharded, gathering, num_columns
