"""The KV blocks: how many fit, and the tensors that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.model import ModelShape

CPU_CACHE_BYTES = 2 << 30
"""The default limit of the cache on a CPU; blocks that are never written take no memory."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVCache:
    """Zeroed blocks of every layer in one tensor [layers, 2, N, P, K, D]."""

    blocks: Tensor

    @classmethod
    def allocate(
        cls,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        size = (
            shape.num_layers,
            2,
            num_blocks,
            block_size,
            shape.num_kv_heads,
            shape.head_size,
        )
        try:
            return cls(_zeros(size, dtype, device))
        # torch.OutOfMemoryError is a RuntimeError; the others are of sizes beyond all bounds.
        except (MemoryError, RuntimeError, ValueError, OverflowError, TypeError) as error:
            gib = math.prod(size) * dtype.itemsize / _GIB
            raise OutOfMemoryError(
                f"cache.num_blocks: {num_blocks} blocks of {block_size} tokens take {gib:.1f} GiB, "
                f"which {device} does not have ({error}); ask for fewer, or leave it out"
            ) from error

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[2]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [N, P, K, D]."""
        return self.blocks[index, 0], self.blocks[index, 1]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: backends may read (and discard) a block's unused tail, and NaN spreads."""
    if device.type == "cpu":
        # The system's zero pages: memory is taken when one is written, not at the start.
        zeros = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(size)
    return torch.zeros(size, dtype=dtype, device=device)


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_size * dtype.itemsize


def num_blocks_on_cpu(bytes_per_block: int, blocks_per_seq: int, max_num_seqs: int) -> int:
    """Blocks for a CPU: as many as rows could ever use, within `CPU_CACHE_BYTES`.

    One sequence of the model's length always fits, for blocks that are never written cost nothing.
    """
    most = min(blocks_per_seq * max_num_seqs, most_blocks_on_cpu(bytes_per_block))
    return max(blocks_per_seq, most)


def most_blocks_on_cpu(bytes_per_block: int) -> int:
    """Blocks within `CPU_CACHE_BYTES`, at least one."""
    return max(1, CPU_CACHE_BYTES // bytes_per_block)


@dataclass(frozen=True, slots=True)
class MemoryBefore:
    """Memory in use when an engine starts, in bytes: none of it is the engine's own.

    `reserved` is what torch's allocator holds for other engines and tensors of this process.
    `context` is what CUDA itself took of the device because this engine was the first to use it; 0
    if it was not.
    """

    reserved: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a GPU, and this engine's use of it, in bytes.

    `reserved` is what torch's allocator holds for this process now, and `peak` the most that it
    held since the engine began, activations of the largest step included. These are numbers of the
    whole process: what another thread allocates while the engine starts counts as the engine's.
    `free` is unused by any process that shares the device. `graphs` is what captured
    steps will keep beside it.
    """

    total: int
    free: int
    reserved: int
    peak: int
    before: MemoryBefore = MemoryBefore()
    graphs: int = 0

    @classmethod
    def measure(cls, device: torch.device, before: MemoryBefore, graphs: int = 0) -> DeviceMemory:
        """Read the device."""
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            peak=torch.cuda.max_memory_reserved(device),
            before=before,
            graphs=graphs,
        )

    @property
    def needed(self) -> int:
        """Bytes that this engine takes at its peak, without blocks."""
        return self.peak - self.before.reserved + self.before.context + self.graphs

    def share_left(self, utilization: float) -> int:
        """Bytes of this engine's share of the device that its blocks may take."""
        return int(self.total * utilization) - self.needed

    @property
    def free_left(self) -> int:
        """Bytes that no process uses and that this engine's steps will not need."""
        return self.free - (self.peak - self.reserved) - self.graphs

    def budget(self, utilization: float) -> int:
        """Bytes left for blocks: this engine's share less what it needs, never more than is free.

        Others, in this process or in another, count only through `free`: what they hold is not
        taken off our share.
        """
        return min(self.share_left(utilization), self.free_left)


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
        more = (
            f"raise cache.num_blocks to {needed}"
            if given
            else ("give the cache more memory (raise cache.gpu_memory_utilization)")
        )
        raise OutOfMemoryError(
            f"the KV cache holds {num_blocks} blocks of {block_size} tokens "
            f"({num_blocks * block_size} tokens), but limits.max_model_len={max_model_len} needs "
            f"{needed}; set limits.max_model_len to at most {num_blocks * block_size} (or to fit, "
            f"which takes the longest that fits), or {more}"
        )


def fitting_length(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Tokens of the longest sequence that `num_blocks` blocks hold, `max_model_len` at most."""
    return min(max_model_len, num_blocks * block_size)
