"""The model runner: applies plans to the device's tables and launches their steps.

A step has two shapes. A decode step has one token per row, padded to a bucket, and is the same
sequence of kernels every time, from the row tables to the sampled ids: captured once per bucket
and replayed (see `graphs`), or run eagerly with the same padding (on a CPU every batch size is a
bucket, so there is none). A step with prompt chunks is built and launched eagerly.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import DecodeMetadata, PrefillMetadata
from nanovllm_core.interfaces.plan import PrefillChunk, RowSampling, StepPlan, StepResult
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker.attention import AttentionBatch, PagedAttention
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.graphs import DecodeGraphs
from nanovllm_core.worker.model import LoadedModel
from nanovllm_core.worker.processors import RowProcessors
from nanovllm_core.worker.results import ResultRing
from nanovllm_core.worker.row_ops import get_row_ops
from nanovllm_core.worker.rows import RowTables, RowUpdates, StagingRing
from nanovllm_core.worker.sampler import LogprobTensors, SamplerTail

_NOTHING_ASKED = RowSampling()


class ModelRunner:
    """Runs the steps of one model on one device.

    `bucket_sizes` are the batch sizes of decode steps, increasing; the last is the number of rows.
    """

    def __init__(
        self,
        model: LoadedModel,
        attention: PagedAttention,
        sampler: Sampler,
        processors: RowProcessors,
        *,
        max_model_len: int,
        block_size: int,
        bucket_sizes: tuple[int, ...],
        max_steps_in_flight: int,
    ) -> None:
        self.device = model.device
        self.model = model
        self.attention = attention
        self.max_model_len = max_model_len
        self.bucket_sizes = bucket_sizes
        max_rows = bucket_sizes[-1]
        self.tables = RowTables.allocate(max_rows, max_model_len, block_size, self.device)
        self.max_blocks = self.tables.block_table.shape[1]
        self.ops = get_row_ops(self.device)
        self._updates = RowUpdates(self.tables)
        self._staging = StagingRing(self.device, num_slots=2 * max_steps_in_flight)
        self._results = ResultRing(self.device, max_rows, max_steps_in_flight)
        self._inputs = StepInputs.allocate(max_rows, max_rows, self.max_blocks, self.device)
        vocab_size = model.shape.vocab_size
        self.logits = torch.zeros((max_rows, vocab_size), dtype=model.dtype, device=self.device)
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._never = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.sampler = sampler
        self._processors = processors
        self._tail = SamplerTail(self.device, vocab_size, sampler, processors)
        self._row_sampling = [RowSampling()] * max_rows
        self._row_needs_tail = np.zeros(max_rows, dtype=np.bool_)
        self._active: tuple[int, ...] = ()
        self._active_sampling: tuple[RowSampling, ...] = ()
        self._tail_is_on = False
        self._graphs: DecodeGraphs | None = None

    # -- the executor's calls ---------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Apply the plan's deltas and launch its step; never waits for the device."""
        self._apply(plan)
        if plan.prefill:
            self._launch_mixed(plan)
        else:
            self._launch_decode(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""
        return self._results.collect()

    @torch.inference_mode()
    def trial_step(self, num_tokens: int) -> None:
        """Run the largest step there can be, to no effect but on page 0, for its peak memory."""
        length = min(num_tokens, self.max_model_len)
        num_chunks = min(-(-num_tokens // length), self.bucket_sizes[-1])
        chunks = tuple(PrefillChunk(row, 0, length, samples=False) for row in range(num_chunks))
        inputs, metadata = self._prepare_prefill(chunks)
        self.attention.begin_step(AttentionBatch(inputs.slot_mapping, prefill=metadata))
        hidden = self.model.forward(inputs.input_ids, inputs.positions)
        self.model.compute_logits(hidden[: self.bucket_sizes[-1]])

    # -- deltas -----------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        membership_changed = plan.decode_rows is not self._active
        if plan.has_deltas or membership_changed:
            for admission in plan.admissions:
                self._updates.admit(admission)
                self._processors.admit(admission.row, admission.sampling.logits_processors)
                self._row_sampling[admission.row] = admission.sampling
                self._row_needs_tail[admission.row] = admission.sampling.needs_tail
            self._updates.append_pages(plan.appends)
            if membership_changed:
                self._set_active(plan.decode_rows)
        packed = self._updates.take()
        if packed is not None:
            self.ops.scatter_updates(self.tables.arena, self._staging.copy(packed))

    def _set_active(self, rows: tuple[int, ...]) -> None:
        self._active = rows
        self._updates.set_active_rows(rows)
        needs_tail = bool(self._row_needs_tail[list(rows)].any())
        self._active_sampling = self._sampling_of(rows) if needs_tail else ()
        if needs_tail != self._tail_is_on:
            self._tail_is_on = needs_tail
            self._updates.set_skip_sampler(needs_tail)

    def _sampling_of(self, rows: tuple[int, ...]) -> tuple[RowSampling, ...]:
        return tuple(self._row_sampling[row] for row in rows)

    # -- decode steps -----------------------------------------------------------------------------

    def bucket(self, num_rows: int) -> int:
        """The smallest of the bucket sizes that holds `num_rows`."""
        return self.bucket_sizes[bisect_left(self.bucket_sizes, num_rows)]

    def capture(self, graphs: DecodeGraphs) -> None:
        """Capture a decode step at every bucket; decode steps are replays from now on."""
        with torch.inference_mode():
            graphs.capture(self.bucket_sizes, self.decode)
        self._results.reset()
        self._graphs = graphs

    def _launch_decode(self, plan: StepPlan) -> None:
        num_rows = len(plan.decode_rows)
        bucket = self.bucket(num_rows)
        if self._graphs is None:
            with torch.inference_mode():
                self.decode(bucket)
        else:
            self._graphs.replay(bucket)
        logprobs = None
        if self._tail_is_on:
            inputs = self._inputs.slice(slice(num_rows), slice(num_rows))
            logprobs = self._run_tail(
                self.logits[:num_rows],
                inputs,
                plan.decode_rows,
                self._active_sampling,
            )
        self._results.push(num_rows, logprobs=logprobs)

    def decode(self, bucket: int) -> None:
        """One decode step of `bucket` rows, from the row tables to the result: what is captured."""
        inputs = self._inputs.slice(slice(bucket), slice(bucket))
        self.ops.prepare_decode(self.tables, inputs)
        self.attention.begin_step(
            AttentionBatch(inputs.slot_mapping, self._decode_metadata(inputs))
        )
        hidden = self.model.forward(inputs.input_ids, inputs.positions)
        logits = self.model.compute_logits(hidden, out=self.logits[:bucket])
        self._sample(logits, inputs, skip=self.tables.skip_sampler)

    # -- steps with prompt chunks -----------------------------------------------------------------

    @torch.inference_mode()
    def _launch_mixed(self, plan: StepPlan) -> None:
        """Decode rows first, then the packed chunks; one forward pass over all their tokens."""
        decode, num_decode = None, len(plan.decode_rows)
        if num_decode:
            decode = self._inputs.slice(slice(num_decode), slice(num_decode))
            self.ops.prepare_decode(self.tables, decode)
        prefill, metadata = self._prepare_prefill(plan.prefill)
        inputs = prefill if decode is None else StepInputs.concatenate(decode, prefill)
        self.attention.begin_step(
            AttentionBatch(inputs.slot_mapping, self._decode_metadata(decode), metadata)
        )
        hidden = self.model.forward(inputs.input_ids, inputs.positions)
        ends = metadata.query_start_loc[1:] - 1
        if num_decode:
            ends = torch.cat([torch.arange(num_decode, device=self.device), ends + num_decode])
        logits = self.model.compute_logits(hidden.index_select(0, ends))
        self._finish_mixed(plan, logits, inputs)

    def _prepare_prefill(
        self, chunks: tuple[PrefillChunk, ...]
    ) -> tuple[StepInputs, PrefillMetadata]:
        num_chunks = len(chunks)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        # Each part starts at a multiple of 16 bytes: kernels are compiled for an alignment.
        width = -(-(num_chunks + 1) // 4) * 4
        host = np.zeros((6, width), dtype=np.int32)
        host[0, : num_chunks + 1] = starts
        host[1, :num_chunks] = [chunk.row for chunk in chunks]
        host[2, :num_chunks] = [chunk.start for chunk in chunks]
        host[3, :num_chunks] = lengths
        host[4, :num_chunks] = starts[:-1]
        host[5, :num_chunks] = [chunk.samples for chunk in chunks]
        staged = self._staging.copy(host)
        num_tokens = int(starts[-1])
        inputs = StepInputs.allocate(num_tokens, num_chunks, self.max_blocks, self.device)
        max_query_len = int(lengths.max())
        self.ops.prepare_prefill(self.tables, staged[1:, :num_chunks], inputs, max_query_len)
        return inputs, PrefillMetadata(
            block_table=inputs.block_table,
            seq_lens=inputs.seq_lens,
            query_start_loc=staged[0, : num_chunks + 1],
            max_query_len=max_query_len,
            max_seq_len=max(chunk.start + chunk.length for chunk in chunks),
        )

    def _finish_mixed(self, plan: StepPlan, logits: Tensor, inputs: StepInputs) -> None:
        rows = plan.decode_rows + tuple(chunk.row for chunk in plan.prefill)
        logprobs = None
        if self._row_needs_tail[list(plan.sampled_rows)].any():
            sampling = self._sampling_of(plan.decode_rows) + tuple(
                self._row_sampling[chunk.row] if chunk.samples else _NOTHING_ASKED
                for chunk in plan.prefill
            )
            logprobs = self._run_tail(logits, inputs, rows, sampling)
        else:
            self._sample(logits, inputs, skip=self._never)
        entries = None
        if not all(chunk.samples for chunk in plan.prefill):
            samples = [True] * len(plan.decode_rows) + [chunk.samples for chunk in plan.prefill]
            entries = np.flatnonzero(samples)
        self._results.push(inputs.num_rows, entries, logprobs)

    # -- sampling ---------------------------------------------------------------------------------

    def _decode_metadata(self, inputs: StepInputs | None) -> DecodeMetadata | None:
        if inputs is None:
            return None
        return DecodeMetadata(inputs.block_table, inputs.seq_lens, max_seq_len=self.max_model_len)

    def _sample(self, logits: Tensor, inputs: StepInputs, skip: Tensor) -> None:
        """Greedy and temperature; on the device `skip` says whether a tail does it instead."""
        tables, sampled = self.tables, self._sampled[: inputs.num_rows]
        self.sampler.sample(
            logits, inputs.rows, tables.temperature, tables.seed, inputs.output_index, sampled, skip
        )
        self.ops.finish_step(tables, inputs, sampled, self._results, skip)

    @torch.inference_mode()
    def _run_tail(
        self,
        logits: Tensor,
        inputs: StepInputs,
        rows: tuple[int, ...],
        sampling: tuple[RowSampling, ...],
    ) -> LogprobTensors | None:
        """Everything beyond greedy and temperature, from logits that are already there."""
        tables, sampled = self.tables, self._sampled[: inputs.num_rows]
        logprobs = self._tail(
            logits,
            rows,
            sampling,
            tables.token_ids,
            inputs.seq_lens,
            inputs.seq_lens - inputs.output_index,
            inputs.output_index,
            tables.temperature,
            tables.seed,
            inputs.rows,
            sampled,
        )
        self.ops.finish_step(tables, inputs, sampled, self._results, self._never)
        return logprobs
