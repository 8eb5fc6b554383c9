"""The sampler's tail: everything beyond greedy and temperature, after a step's logits.

It runs eagerly on batches in which some row asks for more than the captured sampler does. The
order is vLLM's: logit bias, processors, penalties, minimum length, temperature, min_p, top_k,
top_p. Temperature is undone before the choice, which is the captured sampler's own, noise and ties
included: a row that asks for nothing gets the very token that it would have got without its
neighbours.

Log-probabilities are of the raw logits, before any of this, as vLLM's default is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.plan import RowSampling, TokenLogprobs
from nanovllm_core.interfaces.sampler import Sampler
from nanovllm_core.worker import logits as logit_ops
from nanovllm_core.worker.processors import LoadedProcessor, RowProcessors, run_processor

TRANSIENT_BYTES = 256 << 20
"""The memory of the tail beyond its inputs: it computes as many rows at a time as fit."""

Column = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities (nats) of the N batch entries that asked, K the most that any asked for.

    `token_logprobs` [N] and `top_logprobs` [N, K] are float32, `top_ids` [N, K] int64.
    `num_top[i]` of the K columns are what entry `entries[i]` asked for.
    """

    entries: tuple[int, ...]
    num_top: tuple[int, ...]
    token_logprobs: Tensor
    top_logprobs: Tensor
    top_ids: Tensor

    def to_host(self) -> LogprobTensors:
        """Start copies to pinned memory; they are there when the stream has come past them."""
        if self.token_logprobs.device.type == "cpu":
            return self
        tensors = (self.token_logprobs, self.top_logprobs, self.top_ids)
        return LogprobTensors(self.entries, self.num_top, *map(_to_pinned, tensors))

    def to_records(self) -> dict[int, TokenLogprobs]:
        """The same as plain data by batch entry; waits for the device unless on the host."""
        records = {}
        columns = (self.token_logprobs, self.top_ids, self.top_logprobs)
        lists = zip(*(column.tolist() for column in columns), strict=True)
        for entry, num_top, (token, ids, top) in zip(
            self.entries, self.num_top, lists, strict=True
        ):
            pairs = tuple(zip(ids[:num_top], top[:num_top], strict=True))
            records[entry] = TokenLogprobs(token, pairs)
        return records


@dataclass(frozen=True, slots=True)
class _Work:
    """The operations on some rows, as device tensors: int64 indices and limits, float32 factors.

    `entries` and `rows` name the S rows in the batch and in the tables; the other groups name
    theirs by position among the S.
    """

    entries: Tensor
    rows: Tensor
    biased: Tensor
    biased_ids: Tensor
    bias: Tensor
    penalised: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    stopping: Tensor
    stop_ids: Tensor
    min_tokens: Tensor
    floored: Tensor
    log_min_p: Tensor
    cut: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass(frozen=True, slots=True)
class _Processing:
    """The rows of one `_Work` that asked for a processor: in the tables, in it, in the batch."""

    loaded: LoadedProcessor
    rows: tuple[int, ...]
    which: Tensor
    entries: Tensor


@dataclass(frozen=True, slots=True)
class _Reports:
    """The batch entries that want log-probabilities, how many each, and the same on the device."""

    entries: tuple[int, ...]
    num_top: tuple[int, ...]
    groups: list[Tensor]


class SamplerTail:
    """Applies each row's own sampling parameters to a batch of logits and chooses its tokens."""

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        sampler: Sampler,
        processors: RowProcessors,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._sample = sampler.sample
        self._processors = processors
        self._never = torch.zeros(1, dtype=torch.int32, device=device)
        self._params: Sequence[RowSampling] = ()
        self._rows: Sequence[int] = ()
        self._work: list[tuple[_Work, list[_Processing]]] = []
        self._reports = _Reports((), (), [])

    def __call__(
        self,
        logits_BV: Tensor,
        rows: Sequence[int],
        params: Sequence[RowSampling],
        token_ids_RL: Tensor,
        num_known_B: Tensor,
        num_prompt_B: Tensor,
        output_index_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        rows_B: Tensor,
        out_B: Tensor,
    ) -> LogprobTensors | None:
        """Choose a token per entry into `out_B` (int32); returns log-probabilities if any asked.

        `rows` and `params` say on the host which row each entry is and what it wants; what they
        mean on the device is kept while they are the same objects. `rows_B` is -1 where the device
        has finished an entry, which gets -1. `token_ids_RL` holds the known ids of each row:
        `num_known_B` of them, the first `num_prompt_B` from the prompt. Never waits for the
        device.
        """
        if params is not self._params or rows is not self._rows:
            self._plan(rows, params, token_ids_RL.shape[1])
        self._sample(logits_BV, rows_B, temperature_R, seed_R, output_index_B, out_B, self._never)
        for work, processing in self._work:
            logits_SV = logits_BV[work.entries].float().nan_to_num_(-math.inf, math.inf, -math.inf)
            output_index_S = output_index_B[work.entries]
            history = (token_ids_RL, num_prompt_B[work.entries], num_known_B[work.entries])
            if work.biased.numel():
                logit_ops.add_bias(logits_SV, work.biased, work.biased_ids, work.bias)
            for one in processing:
                # Nothing is known of a row that the device has ended; a prompt is never empty.
                run_processor(
                    one.loaded,
                    logits_SV,
                    one.which,
                    one.rows,
                    token_ids_RL,
                    num_prompt_B[one.entries].clamp_(min=1),
                    num_known_B[one.entries].clamp_(min=1),
                )
            _apply(work, logits_SV, output_index_S, temperature_R[work.rows], *history)
            out_S = torch.empty_like(output_index_S)
            self._sample(
                logits_SV,
                rows_B[work.entries],
                temperature_R,
                seed_R,
                output_index_S,
                out_S,
                self._never,
            )
            out_B.index_copy_(0, work.entries, out_S)
        if not self._reports.entries:
            return None
        k = max(self._reports.num_top)
        parts = [raw_logprobs(logits_BV, group, out_B, k) for group in self._reports.groups]
        columns = (torch.cat(part) for part in zip(*parts, strict=True))
        return LogprobTensors(self._reports.entries, self._reports.num_top, *columns)

    def _plan(self, rows: Sequence[int], params: Sequence[RowSampling], max_model_len: int) -> None:
        """Gather what each row needs, in groups of rows that fit in memory, and upload it."""
        row_bytes = self._vocab_size * _bytes_per_logit(params, self._device)
        row_bytes += max_model_len * logit_ops.BYTES_PER_KNOWN_ID
        group_size = max(1, TRANSIENT_BYTES // row_bytes)
        changed = [i for i, one in enumerate(params) if _changes_logits(one)]
        asked = [i for i, one in enumerate(params) if one.logprobs is not None]
        groups = _split(changed, group_size)
        columns = [_columns(group, rows, params, self._vocab_size) for group in groups]
        uploaded = _upload([list(one.values()) for one in columns], self._device)
        works = [
            _Work(**dict(zip(one, tensors, strict=True)))
            for one, tensors in zip(columns, uploaded, strict=True)
        ]
        self._work = [
            (work, self._processing(group, rows, params))
            for work, group in zip(works, groups, strict=True)
        ]
        asking = [[np.array(group, np.int64)] for group in _split(asked, group_size)]
        self._reports = _Reports(
            tuple(asked),
            tuple(min(params[i].logprobs or 0, self._vocab_size) for i in asked),
            [entries for (entries,) in _upload(asking, self._device)],
        )
        self._params, self._rows = params, rows

    def _processing(
        self, entries: Sequence[int], rows: Sequence[int], params: Sequence[RowSampling]
    ) -> list[_Processing]:
        """The processors' requests for these batch entries."""
        asked = self._processors.asked_of([params[entry].logits_processors for entry in entries])
        chosen = [(which, [entries[i] for i in which]) for _, which in asked]
        columns = [[np.array(one, np.int64) for one in pair] for pair in chosen]
        return [
            _Processing(loaded, tuple(rows[entry] for entry in mine), which_N, entries_N)
            for (loaded, _), (_, mine), (which_N, entries_N) in zip(
                asked, chosen, _upload(columns, self._device), strict=True
            )
        ]


def raw_logprobs(
    logits_BV: Tensor, entries_N: Tensor, token_B: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax at the token [N], and its k largest values and their ids [N, k], largest first.

    An entry without a token (-1) gets what id 0 would have.
    """
    logits = logits_BV[entries_N].float().nan_to_num_(-math.inf, math.inf, -math.inf)
    logprobs = logits.log_softmax(dim=1)
    token_N1 = token_B[entries_N].clamp(min=0).long()[:, None]
    top = logprobs.topk(k, dim=1)
    return logprobs.gather(1, token_N1)[:, 0], top.values, top.indices


def _apply(
    work: _Work,
    logits_SV: Tensor,
    output_index_S: Tensor,
    temperature_S: Tensor,
    token_ids_RL: Tensor,
    num_prompt_S: Tensor,
    num_known_S: Tensor,
) -> None:
    """Change the logits of these rows in the order that the module states."""
    if work.penalised.numel():
        logit_ops.penalise(
            logits_SV,
            work.penalised,
            work.repetition,
            work.presence,
            work.frequency,
            token_ids_RL[work.rows[work.penalised]],
            num_prompt_S[work.penalised],
            num_known_S[work.penalised],
        )
    if work.stopping.numel():
        logit_ops.forbid_stop_ids(
            logits_SV, work.stopping, work.stop_ids, work.min_tokens, output_index_S
        )
    if work.floored.numel():
        logit_ops.cut_min_p(logits_SV, work.floored, work.log_min_p, temperature_S[work.floored])
    if work.cut.numel():
        logit_ops.cut_top_k_top_p(
            logits_SV, work.cut, work.top_k, work.top_p, temperature_S[work.cut]
        )


def _is_penalised(one: RowSampling) -> bool:
    return (
        one.repetition_penalty != 1.0 or one.presence_penalty != 0.0 or one.frequency_penalty != 0.0
    )


def _is_cut(one: RowSampling) -> bool:
    """A greedy choice is the likeliest id, which no cut removes."""
    return one.temperature > 0.0 and (one.top_k > 0 or one.top_p < 1.0)


def _is_floored(one: RowSampling) -> bool:
    return one.temperature > 0.0 and one.min_p > 0.0


def _is_stopping(one: RowSampling) -> bool:
    return one.min_tokens > 0 and bool(one.stop_token_ids)


def _changes_logits(one: RowSampling) -> bool:
    return (
        bool(one.logits_processors)
        or bool(one.logit_bias)
        or _is_penalised(one)
        or _is_cut(one)
        or _is_floored(one)
        or _is_stopping(one)
    )


def _bytes_per_logit(params: Sequence[RowSampling], device: torch.device) -> int:
    """Bytes of a row for each vocabulary id; the row that needs most counts for all."""
    if device.type == "cpu" and any(map(_is_cut, params)):
        return logit_ops.BYTES_PER_SORTED_LOGIT
    if any(_is_penalised(one) or _is_floored(one) or one.logits_processors for one in params):
        return logit_ops.BYTES_PER_CHANGED_LOGIT
    return logit_ops.BYTES_PER_LOGIT


def _columns(
    entries: Sequence[int], rows: Sequence[int], params: Sequence[RowSampling], vocab_size: int
) -> dict[str, Column]:
    """The fields of `_Work` for these batch entries, by name."""
    chosen = [params[entry] for entry in entries]
    biases = [(i, *pair) for i, one in enumerate(chosen) for pair in one.logit_bias]
    penalised = [(i, one) for i, one in enumerate(chosen) if _is_penalised(one)]
    floored = [(i, one) for i, one in enumerate(chosen) if _is_floored(one)]
    cut = [(i, one) for i, one in enumerate(chosen) if _is_cut(one)]
    stops = [
        (i, stop_id, one.min_tokens)
        for i, one in enumerate(chosen)
        if _is_stopping(one)
        for stop_id in one.stop_token_ids
        if stop_id < vocab_size
    ]
    return {
        "entries": np.array(entries, np.int64),
        "rows": np.array([rows[entry] for entry in entries], np.int64),
        "biased": np.array([i for i, _, _ in biases], np.int64),
        "biased_ids": np.array([token_id for _, token_id, _ in biases], np.int64),
        "bias": np.array([bias for _, _, bias in biases], np.float64),
        "penalised": np.array([i for i, _ in penalised], np.int64),
        "repetition": np.array([one.repetition_penalty for _, one in penalised], np.float64),
        "presence": np.array([one.presence_penalty for _, one in penalised], np.float64),
        "frequency": np.array([one.frequency_penalty for _, one in penalised], np.float64),
        "stopping": np.array([i for i, _, _ in stops], np.int64),
        "stop_ids": np.array([stop_id for _, stop_id, _ in stops], np.int64),
        "min_tokens": np.array([min_tokens for _, _, min_tokens in stops], np.int64),
        "floored": np.array([i for i, _ in floored], np.int64),
        "log_min_p": np.array([math.log(one.min_p) for _, one in floored], np.float64),
        "cut": np.array([i for i, _ in cut], np.int64),
        "top_k": np.array([one.top_k if one.top_k > 0 else vocab_size for _, one in cut], np.int64),
        # Rounding may bring a sum of probabilities to 1 before the last id: 1 means no limit.
        "top_p": np.array([one.top_p if one.top_p < 1.0 else 2.0 for _, one in cut], np.float64),
    }


def _split(entries: Sequence[int], size: int) -> list[Sequence[int]]:
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def _upload(groups: Sequence[Sequence[Column]], device: torch.device) -> list[list[Tensor]]:
    """Move all arrays in one copy; int64 stays, float64 becomes float32."""
    arrays = [array for group in groups for array in group]
    if not arrays:
        return []
    packed = _to_device(np.concatenate([array.view(np.int64) for array in arrays]), device)
    sizes = [array.size for array in arrays]
    pieces = (
        piece if array.dtype == np.int64 else piece.view(torch.float64).float()
        for array, piece in zip(arrays, torch.split(packed, sizes), strict=True)
    )
    return [[next(pieces) for _ in group] for group in groups]


def _to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy through pinned memory without waiting; torch keeps it until the copy is done."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _to_pinned(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
