"""The end of a step: from the hidden states of its entries to the tokens that the host collects.

The captured sampler chooses inside the graph. Where a row asks for more than that does, the eager
tail chooses for all rows of the step, behind it; where one is constrained, the tail waits for the
masks that the host makes while the forward pass runs (see `masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import InconsistentStateError, shown
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.kernels import KernelSet
from nanovllm_core.interfaces.model import CausalLM
from nanovllm_core.interfaces.parallel import TensorParallel
from nanovllm_core.interfaces.plan import Admission, RowSampling, StepPlan, TokenMasks
from nanovllm_core.interfaces.sampler import Sampler, SamplerContext
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.logits import MAX_SORTED_ROWS, check_logits
from nanovllm_core.worker.masks import ForwardPass, MaskTable
from nanovllm_core.worker.model import LoadedModel
from nanovllm_core.worker.processors import make_processors
from nanovllm_core.worker.results import LogprobTensors, ResultRing
from nanovllm_core.worker.rows import RowTables
from nanovllm_core.worker.sampler import make_captured_sampler
from nanovllm_core.worker.sampler_tail import EVERYTHING_ASKED, NOTHING_ASKED, SamplerTail
from nanovllm_core.worker.sharded import over_ranks


class StepSampler:
    """Chooses the tokens of every step, and keeps what each row asks for.

    `ops` are the row operations of the device. In debug mode it looks at the logits of every step,
    and waits for the device to do so.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        kernels: KernelSet,
        model: LoadedModel,
        tables: RowTables,
        ops: ModuleType,
        tp: TensorParallel,
    ) -> None:
        config, device, vocab_size = setup.config, model.device, model.shape.vocab_size
        self._max_rows = config.limits.max_num_seqs
        self.max_entries = 2 * self._max_rows
        """Of a step: a full batch and as many chunks."""
        widths = vocab_size, self.max_entries
        context = SamplerContext(device=device, vocab_size=vocab_size, max_entries=self.max_entries)
        self.sampler: Sampler = make_plugin(setup.sampler, context)
        self.results = ResultRing(device, self.max_entries, config.steps_ahead + 2)
        self._module = cast(CausalLM, model.module)
        self._tables = tables
        self._ops = ops
        self._max_model_len = setup.max_model_len
        self._debug = config.debug
        self._processors = make_processors(setup, device, vocab_size)
        self._masks = MaskTable(self._max_rows, vocab_size, device)
        tail = SamplerTail(device, vocab_size, self.sampler, self._processors, self._masks)
        captured = make_captured_sampler(kernels, self.sampler, tables, *widths)
        self._captured, self._tail, num_columns = over_ranks(
            tp, kernels, self.sampler, captured, tail, tables, *widths
        )
        self.logits = torch.zeros((self.max_entries, num_columns), dtype=model.dtype, device=device)
        self._sampled = torch.zeros(self.max_entries, dtype=torch.int32, device=device)
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_sampling = [NOTHING_ASKED] * (self._max_rows + 1)
        """What the eager tail does for a row; the last is that of row -1, which marks padding."""
        self._row_needs_tail = np.zeros(self._max_rows + 1, dtype=np.bool_)
        self._waiting: ForwardPass | None = None
        """The step submitted last, while it waits for masks."""
        self._num_steps = 0

    # -- before a step

    def admit(self, admission: Admission) -> None:
        """A row is given to a request; what it asks for holds until the next admission."""
        row, sampling = admission.row, admission.sampling
        self._processors.admit(row, sampling.logits_processors)
        self._captured.admit(row, sampling)
        needs_tail = self._captured.needs_tail(sampling)
        self._row_needs_tail[row] = needs_tail
        self._row_sampling[row] = sampling if needs_tail else NOTHING_ASKED

    def needs_tail(self, rows: NDArray[np.int32]) -> bool:
        """Whether one of these rows asks for more than the captured sampler does."""
        return bool(self._row_needs_tail[rows].any())

    def check_ready(self, plan: StepPlan) -> None:
        """Raise InconsistentStateError while the step before waits for masks."""
        if self._waiting is not None:
            rows = shown(list(self._waiting.constrained))
            raise InconsistentStateError(
                f"a plan of epoch {plan.epoch} came while the step before it waits for the masks "
                f"of rows {rows}; call sample() between the two"
            )

    def forward_pass(
        self,
        inputs: StepInputs,
        rows: NDArray[np.int32],
        entries: NDArray[np.int64] | None = None,
    ) -> ForwardPass:
        """A step whose first entries are these rows, -1 for padding; see `ForwardPass`."""
        tail_rows = tuple(rows.tolist()) if self.needs_tail(rows) else ()
        sampling = tuple(self._row_sampling[row] for row in tail_rows)
        asked = zip(tail_rows, sampling, strict=True)
        constrained = tuple(row for row, one in asked if one.constrained)
        logprobs = self._captured.logprobs(rows)
        num_tokens = len(rows) if entries is None else len(inputs.input_ids)
        kind = entries is None, num_tokens.bit_length(), bool(sampling)
        return ForwardPass(
            inputs, len(rows), tail_rows, sampling, constrained, entries, logprobs, kind
        )

    # -- in a step, captured with it

    def sample(self, hidden: Tensor, inputs: StepInputs, skip: Tensor) -> None:
        """Choose tokens; on the device `skip` says whether the eager tail does it instead.

        `hidden` [S, E] are the states of the entries of `inputs`, the last layer's.
        """
        logits, sampled = self.logits[: inputs.num_rows], self._sampled[: inputs.num_rows]
        logits = self._module.compute_logits(hidden, logits)
        self._captured.sample(logits, inputs, sampled, skip)
        self._ops.finish_step(self._tables, inputs, sampled, self.results, skip)

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tensors that captured steps use, but for the row tables, by name."""
        return self._captured.captured_tensors()

    # -- behind a step

    def end(self, plan: StepPlan, launched: ForwardPass) -> None:
        """Run the tail and expect the result: now, or when the masks come."""
        self._num_steps += 1
        if plan.samples_later != bool(launched.constrained):
            rows = shown(list(launched.constrained))
            raise InconsistentStateError(
                f"the plan says samples_later={plan.samples_later}, but of the rows that get a "
                f"token {rows} are constrained; it must be set where there are such rows, and only "
                "there"
            )
        if plan.samples_later:
            self._waiting = launched
        else:
            self._run_tail(launched)

    def end_with(self, masks: TokenMasks) -> None:
        """Run the tail of the step that waits for these; InconsistentStateError if none does."""
        if self._waiting is None:
            raise InconsistentStateError(
                f"masks for rows {shown(masks.rows.tolist())} came, but no step waits for masks; "
                "sample() belongs to the plan before it, where that plan samples_later"
            )
        self._masks.load(masks, self._waiting)
        waiting, self._waiting = self._waiting, None
        self._run_tail(waiting)

    def trial_launches(self, make_inputs: Callable[[int], StepInputs]) -> Iterator[partial[Any]]:
        """Tails in which every row asks for everything but processors, to compile their kernels.

        `make_inputs` makes those of so many rows. The first launch has the captured sampling.
        """
        # One row, some and many are sorted, summed and cut by kernels of their own.
        for num_rows in {1, min(MAX_SORTED_ROWS, self._max_rows), self._max_rows}:
            rows, asked = tuple(range(num_rows)), (EVERYTHING_ASKED,) * num_rows
            self._tail.plan(rows, asked, self._max_model_len)
            yield partial(self._after, make_inputs(num_rows), rows, asked)

    def _run_tail(self, launched: ForwardPass) -> None:
        num_rows, logprobs = launched.num_rows, launched.logprobs
        if self._debug:  # Here, for it waits, and a start captures `_after`.
            largest = self._captured.largest(self.logits[:num_rows])
            check_logits(largest, launched.inputs.rows[:num_rows], self._num_steps)
        if launched.sampling:
            inputs = launched.inputs.slice(slice(None), slice(num_rows))
            logprobs = [*logprobs, *self._after(inputs, launched.rows, launched.sampling)]
        self.results.push(num_rows, launched.entries, logprobs, launched.kind)

    @torch.inference_mode()
    def _after(
        self, inputs: StepInputs, rows: tuple[int, ...], sampling: tuple[RowSampling, ...]
    ) -> Sequence[LogprobTensors]:
        """Run the eager tail for `sampling`.

        The captured sampler, launched here, chooses for the rows that do not need it.
        """
        tables, num_rows = self._tables, inputs.num_rows
        logits, sampled = self.logits[:num_rows], self._sampled[:num_rows]
        self._captured.sample(logits, inputs, sampled, self._never)
        logprobs = self._tail(logits, rows, sampling, inputs, tables, sampled)
        self._ops.finish_step(tables, inputs, sampled, self.results, self._never)
        return logprobs
