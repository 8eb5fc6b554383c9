"""The KV blocks: how many fit, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.config.settings import FIT
from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.cache_groups import SequenceNeed, make_groups
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.model import ModelShape

CPU_CACHE_BYTES = 2 << 30
"""The default limit of the cache on a CPU; blocks that are never written take no memory."""

_GIB = 1 << 30


class CacheLayout:
    """Where the keys and values of every layer lie in the blocks of one rank.

    `shape` has this rank's heads. A block has `num_slots` slots, one for each layer of its group;
    layers that keep less of a token than others leave the rest of their slot unused. A slot has
    room for keys and for values; for one row per token where no layer keeps two.
    """

    def __init__(self, shape: ModelShape, block_size: int, dtype: torch.dtype) -> None:
        self.groups = make_groups(shape)
        self.block_size = block_size
        self.dtype = dtype
        self.num_slots = max(len(group.layers) for group in self.groups)
        self._num_rows = max(group.attention.rows_per_token for group in self.groups)
        self._row_width = max(group.attention.elements_per_row for group in self.groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group; see `WorkerInfo.cache_windows`."""
        return tuple(group.sliding_window for group in self.groups)

    def need(self, max_chunk: int) -> SequenceNeed:
        """The blocks that one sequence needs, in steps of at most `max_chunk` of its tokens."""
        return SequenceNeed(self.windows, self.block_size, max_chunk)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its slots, all rows of their tokens."""
        num_rows = self.num_slots * self._num_rows * self.block_size
        return num_rows * self._row_width * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Blocks in one tensor [slots, rows, N, P, W]; W is K * D of the layers that keep most.

        Rows are 2, keys and values, or 1 where all layers keep one.

        Zeros, not empty: backends may read (and discard) a block's unused tail, and NaN spreads.
        Raises OutOfMemoryError, with what they would take.
        """
        size = (self.num_slots, self._num_rows, num_blocks, self.block_size, self._row_width)
        num_bytes = num_blocks * self.block_bytes
        try:
            if device.type == "cpu":
                # The system's zero pages: memory is taken when one is written, not at the start.
                zeros = np.zeros(num_bytes, dtype=np.uint8)
                return torch.from_numpy(zeros).view(self.dtype).view(size)
            return torch.zeros(size, dtype=self.dtype, device=device)
        # torch.OutOfMemoryError is a RuntimeError; the others are of sizes beyond all bounds.
        except (MemoryError, RuntimeError, ValueError, OverflowError, TypeError) as error:
            raise OutOfMemoryError(
                f"cache.num_blocks: {num_blocks} blocks of {self.block_size} tokens take "
                f"{num_bytes / _GIB:.1f} GiB, which {device} does not have ({error}); ask for "
                "fewer, or leave it out"
            ) from error

    def split(self, blocks: Tensor) -> list[LayerCache]:
        """The part of each layer in what `allocate` returned, in the order of the layers."""
        caches = {}
        for index, group in enumerate(self.groups):
            attention = group.attention
            for slot, layer in enumerate(group.layers):
                used = blocks[slot, ..., : attention.elements_per_row]
                rows = used.unflatten(-1, (attention.num_kv_heads, attention.head_size))
                k_cache, v_cache = rows[0], rows[-1]
                if attention.latent is not None:
                    v_cache = k_cache[..., : attention.latent.latent_size]
                caches[layer] = LayerCache(index, k_cache, v_cache)
        return [caches[layer] for layer in sorted(caches)]


class LayerCache(NamedTuple):
    """The keys and values of one layer, [N, P, K, D] each, and the number of its cache group.

    Values of a latent layer are a part of the keys.
    """

    group: int
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a GPU, and this engine's use of it, in bytes.

    `held_before` is what torch's allocator held for other engines and tensors of this process when
    the engine started; `context` is what CUDA itself took of the device because this engine was the
    first to use it, 0 if it was not, and what its connections to other ranks take.
    `reserved` is what torch's allocator holds for this process now, and `peak` the most that it
    held since the engine began, or since its kernels were compiled: activations of the largest
    step included. These are numbers of the whole process, so starts on one device must not overlap.
    `free` is unused by any process that shares the device. `graphs` is what captured steps will
    keep beside it.
    """

    held_before: int = 0
    context: int = 0
    total: int = 0
    free: int = 0
    reserved: int = 0
    peak: int = 0
    graphs: int = 0

    @classmethod
    def open(cls, device: torch.device, connect: Callable[[], None]) -> DeviceMemory:
        """Note what this engine is not to count.

        `connect` creates the CUDA context, if there is none yet, and all that comes with it.
        """
        torch.cuda.set_device(device)
        # Other processes may allocate between the two readings; the window is as short as can be.
        torch.cuda.init()
        free_before, _ = torch.cuda.mem_get_info(device)
        connect()
        torch.cuda.synchronize(device)
        free_after, _ = torch.cuda.mem_get_info(device)
        # What is cached, and the peak so far, is of engines before or beside this one.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        context = max(0, free_before - free_after)
        return cls(held_before=torch.cuda.memory_reserved(device), context=context)

    def measure(self, device: torch.device, graphs: int = 0) -> DeviceMemory:
        """The same as it is now, with these bytes for graphs."""
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return replace(
            self,
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            peak=torch.cuda.max_memory_reserved(device),
            graphs=graphs,
        )

    @property
    def needed(self) -> int:
        """Bytes that this engine takes at its peak, without blocks."""
        return self.peak - self.held_before + self.context + self.graphs

    def share_left(self, utilization: float) -> int:
        """Bytes of this engine's share of the device that its blocks may take."""
        return int(self.total * utilization) - self.needed

    def budget(self, utilization: float) -> int:
        """Bytes left for blocks: this engine's share less what it needs, never more than is free.

        Others, in this process or in another, count only through `free`: what they hold is not
        taken off our share. Of what is free, this engine's steps need some again.
        """
        free_left = self.free - (self.peak - self.reserved) - self.graphs
        return min(self.share_left(utilization), free_left)


def num_blocks_on_gpu(memory: DeviceMemory, utilization: float, bytes_per_block: int) -> int:
    """The number of blocks that fit. Raises OutOfMemoryError if not even one does."""
    budget = memory.budget(utilization)
    if budget < bytes_per_block:
        remedy = "free the GPU of what others hold"
        if memory.share_left(utilization) < bytes_per_block:
            remedy = "raise cache.gpu_memory_utilization, or take a smaller model or dtype"
        raise OutOfMemoryError(
            f"no room for the KV cache: cache.gpu_memory_utilization={utilization} of "
            f"{memory.total / _GIB:.1f} GiB is {memory.total * utilization / _GIB:.1f} GiB, this "
            f"engine needs {memory.needed / _GIB:.1f} GiB and {memory.free / _GIB:.1f} GiB are "
            f"free, which leaves {budget / _GIB:.2f} GiB for blocks of "
            f"{bytes_per_block / _GIB:.4f} GiB; {remedy}"
        )
    return budget // bytes_per_block


def size_cache(
    setup: WorkerSetup,
    shape: ModelShape,
    memory: DeviceMemory | None,
    min_over_ranks: Callable[[int], int],
) -> tuple[int, int]:
    """The blocks of the cache, and the tokens of the longest sequence that may run; on all ranks.

    Every rank has as many blocks as the rank with the fewest. A rank's `shape` has its own heads.
    The blocks are the number that the configuration gives; else on a GPU what `memory` leaves; else
    on a CPU, where it is None, as many as the rows could ever use, within `CPU_CACHE_BYTES`. Unless
    the length is to `fit`, one sequence of `max_model_len` always has room there, for blocks that
    are never written cost nothing. Raises OutOfMemoryError if not one block fits, or not a sequence
    of that length; of one that is to `fit`, if not even one of two tokens does.
    """
    cache, limits, longest = setup.config.cache, setup.config.limits, setup.max_model_len
    layout = CacheLayout(shape, setup.block_size, getattr(torch, setup.dtype))
    need = layout.need(limits.max_num_batched_tokens)
    least = 2 if limits.max_model_len == FIT else longest
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    elif memory is not None:
        num_blocks = num_blocks_on_gpu(memory, cache.gpu_memory_utilization, layout.block_bytes)
    else:
        most = need.blocks(longest) * limits.max_num_seqs
        num_blocks = min(most, max(need.blocks(least), CPU_CACHE_BYTES // layout.block_bytes))
    num_blocks = min_over_ranks(num_blocks)
    need.check_fits(num_blocks, least, given=cache.num_blocks is not None)
    return num_blocks, need.fitting_length(num_blocks, longest)
