"""The device's mirror of the engine's rows: one int32 arena, updated by (address, value) pairs.

Every per-row fact that a step reads on the device lives in one flat int32 tensor: token ids, block
tables, lengths, sampling parameters (floats and 64-bit seeds by their bits), and the prompt chunks
of captured steps. Whatever a plan changes becomes one packed copy and one scatter kernel, whichever
tables it touches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import InconsistentStateError, OutOfMemoryError
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, Admission, RowSampling
from nanovllm_core.interfaces.tail import (
    MAX_ROW_BIASES,
    MAX_ROW_LOGPROBS,
    NUM_ROW_COLUMNS,
    RowColumn,
    RowFlag,
)

_MAX_ELEMENTS = 2**31
"""The device addresses elements by int32 numbers."""

_ADMITTED = (
    *("computed", "num_prompt", "max_length", "min_tokens", "finished"),
    *("temperature", "seed", "stop_ids", "parameters"),
)
"""The tables that an admission sets whole, in the order of these parts of its values."""
_SCALARS = slice(5)
_TEMPERATURE = 5
_SEED = slice(6, 8)
_STOP_IDS = slice(8, 8 + MAX_DEVICE_STOP_IDS)
_PARAMETERS = slice(8 + MAX_DEVICE_STOP_IDS, None)

_PINNED = 2**17
"""Numbers for which each buffer has room from the start: 30,000 new ids and what goes with them."""
_NO_TOP_K = 2**31 - 1
# Rounding may bring a sum of probabilities to 1 before the last id: 1 means no limit.
_NO_TOP_P = 2.0


@dataclass(frozen=True, slots=True)
class RowTables:
    """Views into the arena. R rows, L ids at most, G cache groups, M blocks of each at most.

    `computed`: positions whose KV is in the blocks. `finished`: the device ended the row.
    `active_rows`: the rows that decode, in batch order, -1 beyond. `skip_sampler`: one flag; where
    it is 1 the captured sampler does nothing, because a tail follows. `chunks`: for captured steps
    of so many prompts, as `mixed.pack_chunks` lays them out.
    """

    arena: Tensor
    chunks: Mapping[int, Tensor]
    token_ids: Tensor  # [R, L]
    block_table: Tensor  # [G, R, M]
    computed: Tensor  # [R]
    num_prompt: Tensor  # [R]
    max_length: Tensor  # [R]
    min_tokens: Tensor  # [R]
    finished: Tensor  # [R]
    stop_ids: Tensor  # [R, MAX_DEVICE_STOP_IDS], -1 where unused
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    parameters: Tensor  # [R, NUM_ROW_COLUMNS], see `RowColumn`
    biases: Tensor  # [R, 2, MAX_ROW_BIASES]: increasing ids, then logit biases by their bits
    active_rows: Tensor  # [R]
    skip_sampler: Tensor  # [1]
    block_size: int

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        chunk_shapes: Mapping[int, tuple[int, int]] | None = None,
    ) -> RowTables:
        """Allocate the arena for `max_num_seqs` rows of at most `max_model_len` ids.

        `chunk_shapes`: of chunk tables, by their numbers of prompts; each has a whole number of 16
        bytes.
        """
        chunk_shapes = chunk_shapes or {}
        num_blocks = -(-max_model_len // block_size)
        shapes: dict[str, tuple[int, ...]] = {
            **{f"{count} chunks": shape for count, shape in chunk_shapes.items()},
            "seed": (max_num_seqs, 2),  # there, so that its 64-bit view is aligned
            "token_ids": (max_num_seqs, max_model_len),
            "block_table": (num_groups, max_num_seqs, num_blocks),
            "computed": (max_num_seqs,),
            "num_prompt": (max_num_seqs,),
            "max_length": (max_num_seqs,),
            "min_tokens": (max_num_seqs,),
            "finished": (max_num_seqs,),
            "stop_ids": (max_num_seqs, MAX_DEVICE_STOP_IDS),
            "temperature": (max_num_seqs,),
            "parameters": (max_num_seqs, NUM_ROW_COLUMNS),
            "biases": (max_num_seqs, 2, MAX_ROW_BIASES),
            "active_rows": (max_num_seqs,),
            "skip_sampler": (1,),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        size = sum(sizes)
        if size >= _MAX_ELEMENTS:
            raise OutOfMemoryError(
                f"limits.max_num_seqs ({max_num_seqs}) rows of max_model_len ({max_model_len}) ids "
                f"need tables of {size} numbers, {_MAX_ELEMENTS - 1} at most; lower one of them"
            )
        arena = torch.zeros(size, dtype=torch.int32, device=device)
        parts = zip(shapes.items(), arena.split(sizes), strict=True)
        views = {name: part.view(shape) for (name, shape), part in parts}
        views["temperature"] = views["temperature"].view(torch.float32)
        views["seed"] = views["seed"].view(torch.int64).squeeze(1)
        views["active_rows"].fill_(-1)
        views["finished"].fill_(1)
        chunks = {count: views.pop(f"{count} chunks") for count in chunk_shapes}
        return cls(arena=arena, chunks=chunks, block_size=block_size, **views)

    def layout(self, table: Tensor) -> tuple[int, int]:
        """A table's start, from the arena's, and the size of its rows, both in int32 elements."""
        start = table.data_ptr() - self.arena.data_ptr()
        return start // self.arena.itemsize, table[0].nbytes // self.arena.itemsize


class RowUpdates:
    """Collects (address, value) pairs for the arena on the host. No address may come up twice."""

    def __init__(self, tables: RowTables) -> None:
        self._max_rows = tables.computed.shape[0]
        others = ("token_ids", "block_table", "biases", "active_rows", "skip_sampler")
        self._layout = {name: tables.layout(getattr(tables, name)) for name in others}
        self._chunks_at = {count: tables.layout(one)[0] for count, one in tables.chunks.items()}
        self._num_groups, _, self._max_blocks = tables.block_table.shape
        layouts = [tables.layout(getattr(tables, name)) for name in _ADMITTED]
        self._admitted_at = np.concatenate(
            [first + np.arange(n, dtype=np.int32) for first, n in layouts]
        )
        """The addresses of row 0, and the distances from row to row."""
        self._admitted_by = np.concatenate([np.full(n, n, np.int32) for _, n in layouts])
        self._pieces: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []

    def admit(self, admission: Admission) -> None:
        """Set every table of a row anew; InconsistentStateError for other cache groups."""
        row, sampling = admission.row, admission.sampling
        if len(admission.block_ids) != self._num_groups:
            raise InconsistentStateError(
                f"row {row} has block tables for {len(admission.block_ids)} cache groups, the "
                f"worker has {self._num_groups}; plan for the cache_windows that its start gave"
            )
        self._set("token_ids", row, admission.token_ids)
        first, group_size = self._layout["block_table"]
        for group, block_ids in enumerate(admission.block_ids):
            # A block behind the window is never needed, but its number must be one of a block.
            self._write(first + group * group_size + row * self._max_blocks, block_ids.clip(min=0))
        values = np.empty(len(self._admitted_at), np.int32)
        values[_SCALARS] = (
            admission.num_computed,
            admission.num_prompt_tokens,
            admission.max_length,
            sampling.min_tokens,
            0,
        )
        values.view(np.float32)[_TEMPERATURE] = sampling.temperature
        seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
        values.view(np.uint32)[_SEED] = seed & 0xFFFFFFFF, seed >> 32
        known = sampling.stop_token_ids[:MAX_DEVICE_STOP_IDS]
        values[_STOP_IDS] = (*known, *(-1,) * (MAX_DEVICE_STOP_IDS - len(known)))
        values[_PARAMETERS] = pack_parameters(sampling)
        self._pieces.append((self._admitted_at + row * self._admitted_by, values))
        if sampling.logit_bias:
            first, row_size = self._layout["biases"]
            for column, values in enumerate(pack_biases(sampling)):
                self._write(first + row * row_size + column * MAX_ROW_BIASES, values)

    def append_blocks(self, appends: NDArray[np.int32]) -> None:
        """Add blocks to block tables; `appends` as in `StepPlan`."""
        rows, groups, indices, block_ids = appends.T
        first, group_size = self._layout["block_table"]
        addresses = first + groups * group_size + rows * self._max_blocks + indices
        self._pieces.append((addresses, block_ids))

    def set_active_rows(self, rows: NDArray[np.int32]) -> None:
        """Set the decoding rows, in batch order."""
        active = np.full(self._max_rows, -1, dtype=np.int32)
        active[: len(rows)] = rows
        self._set("active_rows", 0, active)

    def set_chunks(self, packed: NDArray[np.int32], num_chunks: int) -> None:
        """Set the chunks of a captured step of so many."""
        self._write(self._chunks_at[num_chunks], packed.reshape(-1))

    def set_skip_sampler(self, skip: bool) -> None:
        """Switch the captured sampler off or on."""
        self._set("skip_sampler", 0, [int(skip)])

    def take(self) -> NDArray[np.int32] | None:
        """Everything collected so far, [2, n]: addresses, then values; None if there is nothing."""
        if not self._pieces:
            return None
        packed = np.empty((2, sum(values.size for _, values in self._pieces)), np.int32)
        for column, out in zip(zip(*self._pieces, strict=True), packed, strict=True):
            np.concatenate(column, out=out, casting="same_kind")
        self._pieces.clear()
        return packed

    def _set(self, table: str, row: int, values: Sequence[int] | NDArray[np.int32]) -> None:
        """Set the first entries of a table's row."""
        start, row_size = self._layout[table]
        self._write(start + row * row_size, np.asarray(values, dtype=np.int32))

    def _write(self, first: int, values: NDArray[np.int32]) -> None:
        """Set the elements from an address on."""
        self._pieces.append((np.arange(first, first + values.size, dtype=np.int32), values))


def is_captured(sampling: RowSampling) -> bool:
    """True where the captured tail does all that the row asks for, or it asks for nothing."""
    return (
        not sampling.logits_processors
        and not sampling.constrained
        and len(sampling.logit_bias) <= MAX_ROW_BIASES
        and (sampling.logprobs or 0) <= MAX_ROW_LOGPROBS
        and not (sampling.forbids_stop_ids and len(sampling.stop_token_ids) > MAX_DEVICE_STOP_IDS)
    )


def pack_parameters(sampling: RowSampling) -> NDArray[np.int32]:
    """The row's columns, int32 [NUM_ROW_COLUMNS]; neutral where it needs the eager tail."""
    packed = np.zeros(NUM_ROW_COLUMNS, np.int32)
    floats = packed.view(np.float32)
    packed[RowColumn.COUNTED] = -1
    packed[RowColumn.NUM_TOP] = -1
    if not is_captured(sampling):
        return packed
    packed[RowColumn.FLAGS] = (
        RowFlag.CUT * sampling.is_cut
        | RowFlag.PENALISED * sampling.is_penalised
        | RowFlag.BIASED * bool(sampling.logit_bias)
        | RowFlag.FORBIDS * sampling.forbids_stop_ids
    )
    packed[RowColumn.TOP_K] = sampling.top_k if sampling.top_k > 0 else _NO_TOP_K
    floats[RowColumn.TOP_P] = sampling.top_p if sampling.top_p < 1.0 else _NO_TOP_P
    floats[RowColumn.LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    floats[RowColumn.REPETITION] = sampling.repetition_penalty
    floats[RowColumn.PRESENCE] = sampling.presence_penalty
    floats[RowColumn.FREQUENCY] = sampling.frequency_penalty
    if sampling.logprobs is not None:
        packed[RowColumn.NUM_TOP] = sampling.logprobs
    packed[RowColumn.NUM_BIASES] = len(sampling.logit_bias)
    packed[RowColumn.NUM_STOP_IDS] = min(len(sampling.stop_token_ids), MAX_DEVICE_STOP_IDS)
    return packed


def pack_biases(sampling: RowSampling) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids that have a bias, increasing, and the biases by their bits; as many as fit."""
    biases = sorted(sampling.logit_bias)[:MAX_ROW_BIASES]
    ids = np.array([token for token, _ in biases], np.int32)
    return ids, np.array([bias for _, bias in biases], np.float32).view(np.int32)


class StagingRing:
    """Host-to-device copies of int32 arrays that never wait for the device.

    Pinned buffers are used in turn, each guarded by an event, so that none is written again while
    its copy is in flight. A step takes at most three of them. To pin memory waits for the device,
    so they have room for most steps from the start; only a larger array has its buffer pinned anew.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        on_cuda = device.type == "cuda"
        shape = num_slots, _PINNED * on_cuda
        self._buffers = list(torch.empty(shape, dtype=torch.int32, pin_memory=on_cuda).unbind())
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if on_cuda else []
        self._next = 0

    def copy(self, array: NDArray[np.int32]) -> Tensor:
        """Return `array` as a new device tensor, valid for work enqueued on the current stream."""
        if not self._events:
            return torch.from_numpy(array)
        slot = self._next
        self._next = (slot + 1) % len(self._buffers)
        self._events[slot].synchronize()
        if self._buffers[slot].numel() < array.size:
            capacity = 1 << max(10, (array.size - 1).bit_length())
            self._buffers[slot] = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        pinned = self._buffers[slot][: array.size].view(array.shape)
        pinned.numpy()[...] = array
        staged = pinned.to(self._device, non_blocking=True)
        self._events[slot].record()
        return staged
