"""The KV blocks: how many fit, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.config.settings import FIT
from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.model import ModelShape

CPU_CACHE_BYTES = 2 << 30
"""The default limit of the cache on a CPU; blocks that are never written take no memory."""

_GIB = 1 << 30


def allocate_blocks(
    shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Blocks of every layer, keys and values, in one tensor [layers, 2, N, P, K, D].

    Zeros, not empty: backends may read (and discard) a block's unused tail, and NaN spreads. Raises
    OutOfMemoryError, with what they would take.
    """
    size = (
        shape.num_layers,
        2,
        num_blocks,
        block_size,
        shape.num_kv_heads,
        shape.head_size,
    )
    num_bytes = num_blocks * block_bytes(shape, block_size, dtype)
    try:
        if device.type == "cpu":
            # The system's zero pages: memory is taken when one is written, not at the start.
            zeros = np.zeros(num_bytes, dtype=np.uint8)
            return torch.from_numpy(zeros).view(dtype).view(size)
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.OutOfMemoryError is a RuntimeError; the others are of sizes beyond all bounds.
    except (MemoryError, RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise OutOfMemoryError(
            f"cache.num_blocks: {num_blocks} blocks of {block_size} tokens take "
            f"{num_bytes / _GIB:.1f} GiB, which {device} does not have ({error}); ask for fewer, "
            "or leave it out"
        ) from error


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a GPU, and this engine's use of it, in bytes.

    `held_before` is what torch's allocator held for other engines and tensors of this process when
    the engine started; `context` is what CUDA itself took of the device because this engine was the
    first to use it, 0 if it was not.
    `reserved` is what torch's allocator holds for this process now, and `peak` the most that it
    held since the engine began, activations of the largest step included. These are numbers of the
    whole process: what another thread allocates while the engine starts counts as the engine's.
    `free` is unused by any process that shares the device. `graphs` is what captured
    steps will keep beside it.
    """

    held_before: int = 0
    context: int = 0
    total: int = 0
    free: int = 0
    reserved: int = 0
    peak: int = 0
    graphs: int = 0

    @classmethod
    def open(cls, device: torch.device) -> DeviceMemory:
        """Create the CUDA context, if there is none yet; note what this engine is not to count."""
        torch.cuda.set_device(device)
        # Other processes may allocate between the two readings; the window is as short as can be.
        torch.cuda.init()
        free_before, _ = torch.cuda.mem_get_info(device)
        torch.zeros(1, device=device)
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


def check_one_sequence_fits(
    num_blocks: int, block_size: int, max_model_len: int, *, given: bool
) -> None:
    """Refuse a cache in which the longest allowed sequence could never finish.

    `given`: the configuration states the number of blocks; else a GPU's memory decided it.
    """
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        more = f"cache.num_blocks to {needed}" if given else "cache.gpu_memory_utilization"
        raise OutOfMemoryError(
            f"the KV cache holds {num_blocks} blocks of {block_size} tokens "
            f"({num_blocks * block_size} tokens), but limits.max_model_len={max_model_len} needs "
            f"{needed}; set limits.max_model_len to at most {num_blocks * block_size} (or to fit, "
            f"which takes the longest that fits), or raise {more}"
        )


def fitting_length(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Tokens of the longest sequence that `num_blocks` blocks hold, `max_model_len` at most."""
    return min(max_model_len, num_blocks * block_size)


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
    are never written cost nothing. Raises OutOfMemoryError if not one block fits, or a length that
    is not to `fit` does not.
    """
    cache, limits, block_size = setup.config.cache, setup.config.limits, setup.block_size
    per_block = block_bytes(shape, block_size, getattr(torch, setup.dtype))
    is_to_fit = limits.max_model_len == FIT
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    elif memory is not None:
        num_blocks = num_blocks_on_gpu(memory, cache.gpu_memory_utilization, per_block)
    else:
        per_sequence = -(-setup.max_model_len // block_size)
        least = 1 if is_to_fit else per_sequence
        most = per_sequence * limits.max_num_seqs
        num_blocks = min(most, max(least, CPU_CACHE_BYTES // per_block))
    num_blocks = min_over_ranks(num_blocks)
    if not is_to_fit:
        given = cache.num_blocks is not None
        check_one_sequence_fits(num_blocks, block_size, setup.max_model_len, given=given)
    return num_blocks, fitting_length(num_blocks, block_size, setup.max_model_len)
