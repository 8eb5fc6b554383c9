"""The sampler's tail: everything beyond greedy and temperature, after a step's logits.

It runs eagerly for the rows that ask for more than the captured sampler does: for all of them on a
CPU, beside a plugin's sampler, and where the kernel set has no tail; else for processors, masks,
and what row tables cannot hold. The order is vLLM's: logit bias, processors, penalties, minimum
length, temperature, min_p, top_k, top_p. The host's masks come behind the minimum length, so that
nothing allows an id again that a mask forbids, and the cuts choose among those that are allowed.
Temperature is undone before the choice, which is the captured sampler's own, noise and ties
included: a row that asks for nothing gets the very token that it would have got without its
neighbours.

Log-probabilities are of the raw logits, before any of this, as vLLM's default is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.plan import PADDED, RowSampling
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker import logits as logit_ops
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.logits import StepRows
from nanovllm_core.worker.masks import MaskTable
from nanovllm_core.worker.processors import RowProcessors, run_processor
from nanovllm_core.worker.results import LogprobTensors
from nanovllm_core.worker.rows import RowTables

TRANSIENT_BYTES = 256 << 20
"""The memory of the tail beyond its inputs: it computes as many rows at a time as fit."""

NOTHING_ASKED = RowSampling()
"""What a row asks of the tail that does not need it."""

EVERYTHING_ASKED = RowSampling(
    temperature=1.0,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    min_tokens=1,
    stop_token_ids=(0,),
    logprobs=2,
    logit_bias=((0, 1.0),),
    constrained=True,
)
"""A row that needs every kernel of the tail, but for processors."""

Operation = Callable[..., None]
"""A function of `worker.logits`, or a processor: it changes the logits of some `StepRows`."""

Arguments = dict[Operation, Sequence[tuple[float, ...]]]
"""The operations that one row asks for, each with the arguments of one call or more."""


class SamplerTail:
    """Applies each row's own sampling parameters to a batch of logits and chooses its tokens."""

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        sampler: Sampler,
        processors: RowProcessors,
        masks: MaskTable,
    ) -> None:
        self._device = device
        self._masks = masks
        self._vocab_size = vocab_size
        self._sample = sampler.sample
        self._processors = processors
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        self._known: dict[int, tuple[RowSampling, Arguments]] = {}
        """The operations by row, kept for as long as its request is the same."""
        self._params: Sequence[RowSampling] = ()
        self._rows: Sequence[int] = ()
        self._groups: list[tuple[list[Tensor], list[tuple[Operation, list[Tensor]]]]] = []
        """Rows changed together: int64 places in the batch and in the tables, and 1 where -1 is
        the answer if no id is left; what is called."""
        self._asked: tuple[int, ...] = ()
        self._num_top: tuple[int, ...] = ()
        self._asked_groups: list[Tensor] = []

    def __call__(
        self,
        logits_BV: Tensor,
        rows: Sequence[int],
        params: Sequence[RowSampling],
        inputs: StepInputs,
        tables: RowTables,
        out_B: Tensor,
    ) -> Sequence[LogprobTensors]:
        """Choose for the entries that ask, into `out_B` (int32), which has the choice of the rest.

        Returns the log-probabilities of those that asked, none if none did.

        `rows` and `params` say on the host which row each entry is and what it wants; what they
        mean on the device is kept while they are the same objects. `inputs.rows` is -1 where the
        device has finished an entry, which gets -1; so does one that processors or a mask leave no
        id. `tables.token_ids` holds the known ids of each row: `inputs.seq_lens` of them. Never
        waits for the device.
        """
        num_prompt_B = inputs.seq_lens - inputs.output_index
        if params is not self._params or rows is not self._rows:
            self.plan(rows, params, tables.token_ids.shape[1])
        for (entries_S, rows_S, reports_S), operations in self._groups:
            logits_SV = logits_BV[entries_S].float().nan_to_num_(-math.inf, math.inf, -math.inf)
            step = StepRows(
                rows_S,
                tables.temperature[rows_S],
                inputs.output_index[entries_S],
                num_prompt_B[entries_S],
                inputs.seq_lens[entries_S],
                tables.token_ids,
            )
            for operation, arguments in operations:
                operation(logits_SV, step, *arguments)
            nothing_left_S = (logits_SV.amax(dim=1) == -math.inf) & reports_S.bool()
            # Such a row is padding to the sampler, which gives -1 for it.
            ids_S = inputs.rows[entries_S].masked_fill(nothing_left_S, PADDED)
            index_S = step.output_index
            out_S = torch.empty_like(index_S)
            choice = (logits_SV, ids_S, tables.temperature, tables.seed, index_S)
            self._sample(*choice, out_S, self._never)
            out_B.index_copy_(0, entries_S, out_S)
        if not self._asked:
            return ()
        k = max(self._num_top)
        parts = [raw_logprobs(logits_BV, group, out_B, k) for group in self._asked_groups]
        places = range(len(self._asked))
        return (LogprobTensors(self._asked, self._num_top, places, torch.cat(parts)),)

    def plan(self, rows: Sequence[int], params: Sequence[RowSampling], max_model_len: int) -> None:
        """Gather what each row needs, in groups of rows that fit in memory, and upload it."""
        wanted = [self._wanted(row, one) for row, one in zip(rows, params, strict=True)]
        changed = [i for i, one in enumerate(params) if wanted[i] or one.logits_processors]
        self._asked = tuple(i for i, one in enumerate(params) if one.logprobs is not None)
        self._num_top = tuple(min(params[i].logprobs or 0, self._vocab_size) for i in self._asked)
        row_bytes = self._vocab_size * self._bytes_per_logit(params, set().union(*wanted))
        row_bytes += max_model_len * logit_ops.BYTES_PER_KNOWN_ID
        group_size = max(1, TRANSIENT_BYTES // row_bytes)
        groups = [
            (entries, self._calls(entries, rows, params, wanted))
            for entries in _split(changed, group_size)
        ]
        arrays = []
        for entries, calls in groups:
            asking = [params[entry] for entry in entries]
            reports = [one.constrained or bool(one.logits_processors) for one in asking]
            at = np.array([rows[entry] for entry in entries])
            arrays.append([np.array(entries), at, np.array(reports, np.int64)])
            arrays += [columns for _, columns in calls]
        arrays += [[np.array(entries)] for entries in _split(self._asked, group_size)]
        uploaded = _upload(arrays, self._device)
        self._groups = []
        for _, calls in groups:
            group = next(uploaded)
            operations = [(operation, next(uploaded)) for operation, _ in calls]
            self._groups.append((group, operations))
        self._asked_groups = [entries for (entries,) in uploaded]
        self._params, self._rows = params, rows

    def _wanted(self, row: int, one: RowSampling) -> Arguments:
        known = self._known.get(row)
        if known is None or known[0] is not one:
            known = self._known[row] = (one, _operations(one, self._vocab_size))
            if one.constrained:
                known[1][self._masks.forbid] = [()]
        return known[1]

    def _bytes_per_logit(self, params: Sequence[RowSampling], wanted: set[Operation]) -> int:
        """Bytes of a row for each vocabulary id; the row that needs most counts for all."""
        if self._device.type == "cpu" and logit_ops.cut_top_k_top_p in wanted:
            return logit_ops.BYTES_PER_SORTED_LOGIT
        copying = wanted & {logit_ops.penalise, logit_ops.cut_min_p, self._masks.forbid}
        if copying or any(one.logits_processors for one in params):
            return logit_ops.BYTES_PER_CHANGED_LOGIT
        return logit_ops.BYTES_PER_LOGIT

    def _calls(
        self,
        entries: Sequence[int],
        rows: Sequence[int],
        params: Sequence[RowSampling],
        wanted: Sequence[Arguments],
    ) -> list[tuple[Operation, list[NDArray[Any]]]]:
        """The operations on these batch entries, in the order that the module states."""

        own = [wanted[entry] for entry in entries]

        def calls(*operations: Operation) -> Iterator[tuple[Operation, list[NDArray[Any]]]]:
            for operation in operations:
                arguments = [
                    (i, *values)
                    for i, one in enumerate(own)
                    if operation in one
                    for values in one[operation]
                ]
                if arguments:
                    yield operation, [np.array(column) for column in zip(*arguments, strict=True)]

        processing = [
            (partial(run_processor, loaded, [rows[entries[i]] for i in which]), [np.array(which)])
            for loaded, which in self._processors.asked_of(
                [params[entry].logits_processors for entry in entries]
            )
        ]
        return [
            *calls(logit_ops.add_bias),
            *processing,
            *calls(logit_ops.penalise, logit_ops.forbid_stop_ids, self._masks.forbid),
            *calls(logit_ops.cut_min_p, logit_ops.cut_top_k_top_p),
        ]


def raw_logprobs(logits_BV: Tensor, entries_N: Tensor, token_B: Tensor, k: int) -> Tensor:
    """log_softmax at the token and at its k largest, int32 [N, 1 + 2 k] as `LogprobTensors` has it.

    An entry without a token (-1) gets what id 0 would have.
    """
    logits = logits_BV[entries_N].float().nan_to_num_(-math.inf, math.inf, -math.inf)
    logprobs = logits.log_softmax(dim=1)
    token_N1 = token_B[entries_N].clamp(min=0).long()[:, None]
    top = logprobs.topk(k, dim=1)
    pairs = torch.stack([top.indices.int(), top.values.view(torch.int32)], dim=2)
    return torch.cat([logprobs.gather(1, token_N1).view(torch.int32), pairs.flatten(1)], dim=1)


def _operations(one: RowSampling, vocab_size: int) -> Arguments:
    """The operations that a row asks for, but for processors, with the arguments of each call."""
    wanted: Arguments = {}
    if one.logit_bias:
        wanted[logit_ops.add_bias] = [(token_id, float(bias)) for token_id, bias in one.logit_bias]
    if one.is_penalised:
        penalties = (one.repetition_penalty, one.presence_penalty, one.frequency_penalty)
        wanted[logit_ops.penalise] = [tuple(map(float, penalties))]
    stop_ids = [stop_id for stop_id in one.stop_token_ids if stop_id < vocab_size]
    if one.forbids_stop_ids and stop_ids:
        wanted[logit_ops.forbid_stop_ids] = [(stop_id, one.min_tokens) for stop_id in stop_ids]
    if one.is_cut and one.min_p > 0.0:
        wanted[logit_ops.cut_min_p] = [(math.log(one.min_p),)]
    if one.is_cut and (one.top_k > 0 or one.top_p < 1.0):
        top_k = one.top_k if one.top_k > 0 else vocab_size
        # Rounding may bring a sum of probabilities to 1 before the last id: 1 means no limit.
        top_p = float(one.top_p) if one.top_p < 1.0 else 2.0
        wanted[logit_ops.cut_top_k_top_p] = [(top_k, top_p)]
    return wanted


def _split(entries: Sequence[int], size: int) -> list[Sequence[int]]:
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def _upload(
    groups: Sequence[Sequence[NDArray[Any]]], device: torch.device
) -> Iterator[list[Tensor]]:
    """Move all arrays in one copy; int64 stays, float64 becomes float32."""
    arrays = [array for group in groups for array in group]
    if not arrays:
        return iter(())
    packed = to_device(np.concatenate([array.view(np.int64) for array in arrays]), device)
    pieces = (
        piece if array.dtype == np.int64 else piece.view(torch.float64).float()
        for array, piece in zip(arrays, packed.split([array.size for array in arrays]), strict=True)
    )
    return iter([[next(pieces) for _ in group] for group in groups])


def to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy through pinned memory without waiting; torch keeps it until the copy is done."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
