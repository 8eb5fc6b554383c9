"""The device's mirror of the engine's rows: one int32 arena, updated by (address, value) pairs.

Every per-row fact that a step reads on the device lives in one flat int32 tensor: token ids, block
tables, lengths, sampling parameters (floats and 64-bit seeds by their bits). Whatever a plan
changes becomes one packed copy and one scatter kernel, whichever tables it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, Admission, BlockAppend

_MAX_ELEMENTS = 2**31
"""The device addresses elements by int32 numbers."""


@dataclass(frozen=True, slots=True)
class RowTables:
    """Views into the arena. R rows, L ids at most, M blocks at most.

    `computed`: positions whose KV is in the blocks. `finished`: the device ended the row.
    `active_rows`: the rows that decode, in batch order, -1 beyond. `skip_sampler`: one flag; where
    it is 1 the captured sampler does nothing, because a tail follows.
    """

    arena: Tensor
    token_ids: Tensor  # [R, L]
    block_table: Tensor  # [R, M]
    computed: Tensor  # [R]
    num_prompt: Tensor  # [R]
    max_length: Tensor  # [R]
    min_tokens: Tensor  # [R]
    finished: Tensor  # [R]
    stop_ids: Tensor  # [R, MAX_DEVICE_STOP_IDS], -1 where unused
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    active_rows: Tensor  # [R]
    skip_sampler: Tensor  # [1]
    block_size: int

    @classmethod
    def allocate(
        cls, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> RowTables:
        """Allocate the arena for `max_num_seqs` rows of at most `max_model_len` ids."""
        num_blocks = -(-max_model_len // block_size)
        shapes: dict[str, tuple[int, ...]] = {
            "seed": (max_num_seqs, 2),  # first, so that its 64-bit view is aligned
            "token_ids": (max_num_seqs, max_model_len),
            "block_table": (max_num_seqs, num_blocks),
            "computed": (max_num_seqs,),
            "num_prompt": (max_num_seqs,),
            "max_length": (max_num_seqs,),
            "min_tokens": (max_num_seqs,),
            "finished": (max_num_seqs,),
            "stop_ids": (max_num_seqs, MAX_DEVICE_STOP_IDS),
            "temperature": (max_num_seqs,),
            "active_rows": (max_num_seqs,),
            "skip_sampler": (1,),
        }
        size = sum(map(_numel, shapes.values()))
        if size >= _MAX_ELEMENTS:
            raise OutOfMemoryError(
                f"limits.max_num_seqs ({max_num_seqs}) rows of max_model_len ({max_model_len}) ids "
                f"need tables of {size} numbers, {_MAX_ELEMENTS - 1} at most; lower one of them"
            )
        arena = torch.zeros(size, dtype=torch.int32, device=device)
        views, start = {}, 0
        for name, shape in shapes.items():
            views[name] = arena[start : start + _numel(shape)].view(shape)
            start += _numel(shape)
        views["temperature"] = views["temperature"].view(torch.float32)
        views["seed"] = views["seed"].view(torch.int64).squeeze(1)
        views["active_rows"].fill_(-1)
        views["finished"].fill_(1)
        return cls(arena=arena, block_size=block_size, **views)

    def address(self, table: Tensor) -> int:
        """The start of a table, in int32 elements from the arena's start."""
        return (table.data_ptr() - self.arena.data_ptr()) // self.arena.element_size()


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


class RowUpdates:
    """Collects (address, value) pairs for the arena on the host. No address may come up twice."""

    def __init__(self, tables: RowTables) -> None:
        self._max_model_len = tables.token_ids.shape[1]
        self._max_blocks = tables.block_table.shape[1]
        self._max_rows = tables.computed.shape[0]
        scalars = ("computed", "num_prompt", "max_length", "min_tokens", "finished", "temperature")
        self._scalar_at = np.array([tables.address(getattr(tables, n)) for n in scalars], np.int32)
        self._token_ids_at = tables.address(tables.token_ids)
        self._block_table_at = tables.address(tables.block_table)
        self._stop_ids_at = tables.address(tables.stop_ids)
        self._seed_at = tables.address(tables.seed)
        self._active_rows_at = tables.address(tables.active_rows)
        self._skip_sampler_at = tables.address(tables.skip_sampler)
        self._pieces: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []

    def admit(self, admission: Admission) -> None:
        """Set every table of a row anew."""
        row, sampling = admission.row, admission.sampling
        self._range(self._token_ids_at + row * self._max_model_len, admission.token_ids)
        self._range(self._block_table_at + row * self._max_blocks, admission.block_ids)
        scalars = np.array(
            [
                admission.num_computed,
                admission.num_prompt_tokens,
                admission.max_length,
                sampling.min_tokens,
                0,
                np.float32(sampling.temperature).view(np.int32),
            ],
            dtype=np.int32,
        )
        self._pieces.append((self._scalar_at + np.int32(row), scalars))
        stop_ids = np.full(MAX_DEVICE_STOP_IDS, -1, dtype=np.int32)
        known = sampling.stop_token_ids[:MAX_DEVICE_STOP_IDS]
        stop_ids[: len(known)] = known
        self._range(self._stop_ids_at + row * MAX_DEVICE_STOP_IDS, stop_ids)
        seed = np.array([sampling.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64).view(np.int32)
        self._range(self._seed_at + row * 2, seed)

    def append_blocks(self, appends: Sequence[BlockAppend]) -> None:
        """Add blocks to block tables."""
        if appends:
            pairs = np.array(
                [(a.row * self._max_blocks + a.index, a.block_id) for a in appends], dtype=np.int32
            )
            self._pieces.append((pairs[:, 0] + np.int32(self._block_table_at), pairs[:, 1]))

    def set_active_rows(self, rows: Sequence[int]) -> None:
        """Set the decoding rows, in batch order."""
        active = np.full(self._max_rows, -1, dtype=np.int32)
        active[: len(rows)] = rows
        self._range(self._active_rows_at, active)

    def set_skip_sampler(self, skip: bool) -> None:
        """Switch the captured sampler off or on."""
        self._range(self._skip_sampler_at, [int(skip)])

    def take(self) -> NDArray[np.int32] | None:
        """Everything collected so far, [2, n]: addresses, then values; None if there is nothing."""
        if not self._pieces:
            return None
        packed = np.stack([np.concatenate(column) for column in zip(*self._pieces, strict=True)])
        self._pieces.clear()
        return packed

    def _range(self, start: int, values: Sequence[int] | NDArray[np.int32]) -> None:
        array = np.asarray(values, dtype=np.int32)
        addresses = np.arange(start, start + array.size, dtype=np.int32)
        self._pieces.append((addresses, array))


class StagingRing:
    """Host-to-device copies of int32 arrays that never wait for the device.

    Pinned buffers are used in turn, each guarded by an event, so that none is written again while
    its copy is in flight. A step takes at most two of them.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(num_slots)]
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if self._cuda else []
        self._next = 0

    @property
    def _cuda(self) -> bool:
        return self._device.type == "cuda"

    def copy(self, array: NDArray[np.int32], out: Tensor | None = None) -> Tensor:
        """Return `array` as a device tensor, valid for work enqueued on the current stream.

        It is a new one, or `out`, which work enqueued before may still read.
        """
        if not self._cuda:
            staged = torch.from_numpy(array)
            return staged if out is None else out.copy_(staged)
        slot = self._next
        self._next = (slot + 1) % len(self._buffers)
        self._events[slot].synchronize()
        if self._buffers[slot].numel() < array.size:
            capacity = 1 << max(10, (array.size - 1).bit_length())
            self._buffers[slot] = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        pinned = self._buffers[slot][: array.size].view(array.shape)
        pinned.numpy()[...] = array
        if out is None:
            staged = pinned.to(self._device, non_blocking=True)
        else:
            staged = out.copy_(pinned, non_blocking=True)
        self._events[slot].record()
        return staged
