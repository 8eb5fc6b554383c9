"""The model runner: applies plans to the device's tables and launches their steps.

A step has two shapes. A decode step has one token per row, padded to a bucket, and is the same
sequence of kernels every time, from the row tables to the sampled ids: captured once per bucket
and replayed (see `graphs`), or run eagerly with the same padding (on a CPU every batch size is a
bucket, so there is none). A mixed step has prompt chunks too (see `mixed`): captured at a few sizes
where the attention backends can be, launched eagerly beyond the largest, and of latent attention
where that is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.absorption import most_captured_tokens
from nanovllm_core.interfaces.attention import DecodeMetadata
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import CausalLM
from nanovllm_core.interfaces.parallel import TensorParallel
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan, StepResult, TokenMasks
from nanovllm_core.worker.attention import PagedAttention
from nanovllm_core.worker.batch import StepInputs, aligned
from nanovllm_core.worker.graphs import StepGraphs, StepKey
from nanovllm_core.worker.mixed import (
    ChunkTable,
    MixedStep,
    chunk_table_shape,
    mixed_keys,
    pack_chunks,
    rows_apart,
    trial_chunks,
)
from nanovllm_core.worker.model import LoadedModel
from nanovllm_core.worker.progress import Laps
from nanovllm_core.worker.rows import RowTables, RowUpdates, StagingRing
from nanovllm_core.worker.step_sampler import StepSampler


class ModelRunner:
    """Runs the steps of one model on one device.

    `bucket_sizes` are the batch sizes of decode steps, increasing; the last is the number of rows.
    `prompt_sizes` are the numbers of prompt tokens that mixed steps are captured with, increasing.
    `row_padding`: see `WorkerInfo`.
    `sampling` ends every step.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        kernels: KernelSet,
        model: LoadedModel,
        attention: PagedAttention,
        tp: TensorParallel,
    ) -> None:
        config, device = setup.config, model.device
        self.device = device
        self.model = model
        self._module = cast(CausalLM, model.module)
        self.attention = attention
        self.max_model_len = setup.max_model_len
        self.bucket_sizes = config.graph_sizes
        if device.type == "cpu" and config.cuda_graphs.sizes is None:
            self.bucket_sizes = tuple(range(1, config.limits.max_num_seqs + 1))
        max_rows = self.bucket_sizes[-1]
        prompt_sizes, full_step = setup.prompt_graph_sizes, config.full_step_size
        sizes, most_tokens = (max_rows, self.max_model_len), most_captured_tokens(model.shape)
        if full_step and full_step - max_rows > most_tokens:
            full_step = None  # no step that fills the budget is captured
        self._mixed_keys = mixed_keys(prompt_sizes, full_step, *sizes, most_tokens)
        self.row_padding = rows_apart(max_rows) if self._mixed_keys and full_step else 1
        chunk_shapes = {
            key.num_chunks: chunk_table_shape(key.num_chunks) for key in self._mixed_keys
        }
        places = *sizes, setup.block_size
        self.tables = RowTables.allocate(*places, device, len(attention.groups), chunk_shapes)
        self.ops = get_row_ops(device)
        self.sampling = StepSampler(setup, kernels, model, self.tables, self.ops, tp)
        self._updates = RowUpdates(self.tables)
        self._staging = StagingRing(device, num_slots=3 * (config.steps_ahead + 2))
        self._clears_blocks = setup.clears_blocks
        self.keys = (*map(StepKey.decode, self.bucket_sizes), *self._mixed_keys)
        self.prompt_sizes = tuple(sorted({key.num_tokens for key in self._mixed_keys}))
        num_tokens = max(key.total_tokens for key in self.keys)
        num_entries = self.sampling.max_entries
        self._inputs = self._allocate_inputs(num_tokens, num_entries)
        self._captured_steps = {
            key: MixedStep.captured(key, self._inputs, self.tables.chunks, self.max_model_len)
            for key in self._mixed_keys
        }
        self._entries = torch.arange(num_entries, device=device)
        self._epoch = 0
        self._active_rows = np.zeros(0, np.int32)
        """The decoding rows of that epoch."""
        self._active = self.sampling.forward_pass(self._inputs, self._active_rows)
        """A decode step of these rows."""
        self._active_key = self.keys[0]
        self._debug = config.debug
        self._graphs: StepGraphs | None = None
        self._needs_warm_up = setup.needs_warm_up

    def _allocate_inputs(self, num_tokens: int, num_entries: int) -> StepInputs:
        num_groups, _, max_blocks = self.tables.block_table.shape
        return StepInputs.allocate(num_tokens, num_entries, max_blocks, self.device, num_groups)

    # -- the executor's calls ---------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Apply the plan's deltas and launch its step; see `Worker.submit`."""
        self.sampling.check_ready(plan)
        self._apply(plan)
        if plan.prefill:
            self._launch_mixed(plan)
        else:
            self._launch_decode(plan)

    def sample(self, masks: TokenMasks) -> None:
        """Launch the sampling of the step submitted last; InconsistentStateError for others."""
        self.sampling.end_with(masks)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""
        return self.sampling.results.collect()

    @torch.inference_mode()
    def trial_step(self, num_tokens: int) -> None:
        """Run the largest step there can be, to no effect but on block 0, for its peak memory.

        With an update of the tables and the tail of a step in which every row asks for everything
        but processors: no request shall be the first to have these kernels compiled or loaded.
        """
        for launch in self.trial_launches(num_tokens):
            launch()
        self.sampling.results.reset()

    def trial_launches(self, num_tokens: int) -> Iterator[partial[Any]]:
        """The parts of `trial_step`, without prompts if `num_tokens` is 0.

        Nothing is copied from the host while one is launched. The first has the captured sampling,
        which takes longest to compile.
        """
        yield from self.sampling.trial_launches(lambda rows: self._allocate_inputs(rows, rows))
        nothing = self._staging.copy(np.zeros((2, 0), np.int32))
        yield partial(self.ops.scatter_updates, self.tables.arena, nothing)
        if num_tokens:
            for context in dict.fromkeys((0, self.attention.context_part)):
                chunks = trial_chunks(
                    num_tokens, self.bucket_sizes[-1], self.max_model_len, context
                )
                step = self._eager_step(chunks, num_decode=0, needs_tail=True)
                yield partial(self._mixed, step)

    def trial_captured_step(self) -> None:
        """Run the largest step that is captured, padding alone, for the memory its graph keeps."""
        self.run_captured(max(self.keys, key=lambda key: key.total_tokens))
        self.sampling.results.reset()  # it has reported, which no plan asked for

    # -- deltas -----------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._updates.admit(admission)
            self.sampling.admit(admission)
        if plan.appends is not None:
            self._updates.append_blocks(plan.appends)
        if self._clears_blocks and (plan.admissions or plan.appends is not None):
            new_blocks = plan.new_blocks(self.attention.layout.block_size)
            self.attention.clear_blocks(self._staging.copy(new_blocks))
        if plan.decode_rows is not None:
            self._epoch = plan.epoch
            self._set_active(plan.decode_rows)
        elif plan.epoch != self._epoch:
            raise InconsistentStateError(
                f"the plan is of epoch {plan.epoch} and leaves its decoding rows out, but the rows "
                f"here are those of epoch {self._epoch}; an executor must pass every plan to every "
                "worker, in the order of submission"
            )

    def _send_updates(self) -> None:
        packed = self._updates.take()
        if packed is not None:
            self.ops.scatter_updates(self.tables.arena, self._staging.copy(packed))

    def _set_active(self, rows: NDArray[np.int32]) -> None:
        self._updates.set_active_rows(rows)
        had_tail = bool(self._active.sampling)
        self._active_rows = rows
        self._active = self.sampling.forward_pass(self._inputs, rows)
        self._active_key = StepKey.decode(self.bucket(len(rows)))
        needs_tail = bool(self._active.sampling)
        if needs_tail != had_tail:
            self._updates.set_skip_sampler(needs_tail)

    # -- decode steps -----------------------------------------------------------------------------

    def bucket(self, num_rows: int) -> int:
        """The smallest of the bucket sizes that holds `num_rows`."""
        return self.bucket_sizes[bisect_left(self.bucket_sizes, num_rows)]

    def capture(self, laps: Laps) -> None:
        """Capture a decode step at every bucket, and the mixed steps; replay them from now on."""
        graphs = StepGraphs(self.device, self._watched, debug=self._debug)
        graphs.capture(self.keys, self.run_captured, laps, warm_up=self._needs_warm_up)
        self.sampling.results.reset()
        self._graphs = graphs

    def close(self) -> None:
        """Free the graphs, before the blocks and weights that they read go."""
        if self._graphs is not None:
            self._graphs.clear()

    def _watched(self) -> dict[str, Tensor]:
        sampler = self.sampling.captured_tensors()
        return {
            "row_tables": self.tables.arena,
            **{f"sampler.{name}": tensor for name, tensor in sampler.items()},
            **self.attention.captured_tensors(),
        }

    @torch.inference_mode()
    def run_captured(self, key: StepKey) -> None:
        """The step that is captured as `key`, launched eagerly."""
        if key.kind == "decode":
            self.decode(key.num_rows)
        else:
            step = self._captured_steps[key]
            step.prefill.slot_mapping.fill_(-1)  # of the padding; the chunks set theirs
            self._mixed(step)

    def _launch(self, key: StepKey) -> None:
        if self._graphs is None:
            self.run_captured(key)
        else:
            self._graphs.replay(key)

    def _launch_decode(self, plan: StepPlan) -> None:
        self._send_updates()
        self._launch(self._active_key)
        self.sampling.end(plan, self._active)

    def decode(self, bucket: int) -> None:
        """One decode step of `bucket` rows, from the row tables to the result: what is captured."""
        inputs = self._inputs.slice(slice(bucket), slice(bucket))
        self.ops.prepare_decode(self.tables, inputs)
        decode = inputs.decode_metadata(self.max_model_len)
        self.attention.begin_step(inputs.slot_mapping, decode)
        hidden = self._module.forward(inputs.input_ids, inputs.positions)
        self.sampling.sample(hidden, inputs, skip=self.tables.skip_sampler)

    # -- mixed steps ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _launch_mixed(self, plan: StepPlan) -> None:
        new = [chunk.row for chunk in plan.prefill if chunk.samples]
        sampled = np.concatenate([self._active_rows, np.array(new, np.int32)])
        needs_tail = self.sampling.needs_tail(sampled)
        key = self._mixed_key(plan)
        if key is None:
            step = self._eager_step(plan.prefill, plan.num_decode, needs_tail)
            self._send_updates()
            self._mixed(step)
        else:
            step = self._captured_steps[key]
            packed = pack_chunks(plan.prefill, key.num_chunks, needs_tail)
            self._updates.set_chunks(packed, key.num_chunks)
            self._send_updates()
            self._launch(key)
        entries = step.reported(plan)
        rows = np.full(step.inputs.num_rows, -1, np.int32)
        rows[entries] = sampled
        self.sampling.end(plan, self.sampling.forward_pass(step.inputs, rows, entries))

    def _mixed_key(self, plan: StepPlan) -> StepKey | None:
        """The smallest captured step that holds the plan's, None where there is none."""
        if not self.attention.suit_capture(plan.prefill):
            return None
        num_tokens = sum(chunk.length for chunk in plan.prefill)
        fitting = (
            key
            for key in self._mixed_keys
            if key.num_tokens >= num_tokens
            and key.num_rows >= plan.num_decode
            and key.num_chunks >= len(plan.prefill)
        )
        return min(fitting, key=lambda key: key.total_tokens, default=None)

    def _eager_step(
        self, chunks: tuple[PrefillChunk, ...], num_decode: int, needs_tail: bool
    ) -> MixedStep:
        """A step of just these chunks, in new memory.

        On CUDA the chunks' inputs begin at an aligned address, unless there are fewer rows.
        """
        if self.device.type == "cuda":
            num_decode = min(aligned(num_decode), self.bucket_sizes[-1])
        packed = pack_chunks(chunks, len(chunks), needs_tail)
        lengths = [chunk.length for chunk in chunks]
        tokens, entries = num_decode + sum(lengths), num_decode + len(chunks)
        return MixedStep(
            self._allocate_inputs(tokens, entries),
            num_decode,
            ChunkTable(self._staging.copy(packed), len(chunks)),
            max_query_len=max(lengths),
            max_seq_len=max(chunk.start + chunk.length for chunk in chunks),
            num_context=sum(chunk.start for chunk in chunks),
        )

    def _mixed(self, step: MixedStep) -> None:
        """Decode entries first, then the packed chunks; one forward pass over all their tokens."""
        inputs, num_decode = step.inputs, step.num_decode
        decode: Sequence[DecodeMetadata] = ()
        if num_decode:
            self.ops.prepare_decode(self.tables, step.decode)
            decode = step.decode.decode_metadata(self.max_model_len)
        self.ops.prepare_prefill(self.tables, step.chunks.chunks, step.prefill, step.max_query_len)
        ends = step.chunks.query_start_loc[1:] + (num_decode - 1)
        last = torch.cat([self._entries[:num_decode], ends])
        self.attention.begin_step(inputs.slot_mapping, decode, step.prefill_metadata(), last)
        hidden = self._module.forward(inputs.input_ids, inputs.positions)
        if not self.attention.has_kept_sampled:
            hidden = hidden.index_select(0, last)
        self.sampling.sample(hidden, inputs, skip=step.chunks.skip_sampler)


def get_row_ops(device: torch.device) -> ModuleType:
    """The module of Triton kernels on CUDA, of torch operations elsewhere: the same functions.

    `rows_reference` documents them.
    """
    if device.type == "cuda":
        from nanovllm_core.worker import rows_triton

        return rows_triton
    from nanovllm_core.worker import rows_reference

    return rows_reference
