"""All-reduces over memory that the GPUs of all ranks write: the ways besides NCCL, and limits.

The memory is torch's symmetric memory, whose API is marked alpha: no other module uses it. Neither
NVLink multicast nor its operations (`multimem_*`) are used; TORCH_SYMM_MEM_DISABLE_MULTICAST is set
for the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm_executor_parallel.one_shot import OneShotAllReduce

ONE_SHOT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TWO_SHOT_DTYPES = (torch.bfloat16, torch.float32)
TWO_SHOT_SIZES = (2, 4, 8)
"""Of torch's kernel."""

MEASURED_CAPABILITY = (9, 0)
"""The least compute capability of GPUs that were measured."""

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Of the one-shot kernel. All of its programs must be resident, beside another kernel's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest x of each way, in bytes. NCCL takes what is larger.

    Two-shot is not used where its limit is not above the other. `one_shot` 0: NCCL takes all.
    """

    one_shot: int
    two_shot: int


@cache
def read_table() -> dict[str, Any]:
    """The committed table, which is the same on all ranks: ways that differ would never meet."""
    table: dict[str, Any] = json.loads(
        files(__package__).joinpath("all_reduce.json").read_text("utf-8")
    )
    return table


def find_unmeasured(devices: Sequence[torch.device], rank: int) -> str:
    """The reason why the ways were not measured for such ranks and GPUs; empty where they were."""
    if len(devices) not in read_table()["measured"]:
        return f"symmetric was not measured with {len(devices)} ranks"
    capability = torch.cuda.get_device_capability(devices[rank])
    if capability < MEASURED_CAPABILITY:
        return f"symmetric was not measured on GPUs of compute capability {capability}"
    return ""


def read_limits(size: int) -> Limits:
    """A number of ranks that is not in the table takes the entry of the next larger one."""
    listed = {int(ranks): Limits(**entry) for ranks, entry in read_table()["limits"].items()}
    return min(((n, x) for n, x in listed.items() if n >= size), default=(0, Limits(0, 0)))[1]


def find_obstacle(devices: Sequence[torch.device], rank: int) -> str:
    """Why symmetric memory does not serve this rank and the others, whose GPUs these are.

    Empty where it does.
    """
    own = devices[rank]
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not read_limits(len(devices)).one_shot:
        return f"all_reduce.json has no one-shot limit for {len(devices)} ranks"
    for peer, other in enumerate(devices):
        if peer != rank and not torch.cuda.can_device_access_peer(own.index, other.index):
            return f"{own} cannot access the memory of rank {peer}'s {other}"
    return ""


def fits(x: Tensor, dtypes: Sequence[torch.dtype], capacity: int) -> bool:
    """True for these dtypes, up to the capacity in bytes, in whole units of 16 bytes."""
    return (
        x.dtype in dtypes
        and 0 < x.nbytes <= capacity
        and x.nbytes % 16 == 0
        and x.data_ptr() % 16 == 0
        and x.is_contiguous()
    )


class TwoShotAllReduce:
    """torch's two-shot all-reduce: each rank sums a part, and reads the parts of the others.

    Its waits have no bound.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self._group_name = group.group_name
        self._buffer = _empty((capacity,), torch.uint8, device)
        _rendezvous(self._buffer, group)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        sent = self._buffer[: x.nbytes].view(x.dtype)
        sent.copy_(x.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_out(sent, "sum", self._group_name, x.view(-1))
        return x


class SymmetricAllReduce:
    """The ways of a rank over symmetric memory. Every rank makes one, at the same time."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, limits: Limits, seconds: float
    ) -> None:
        """Take the memory; `seconds` bounds each wait on the device.

        No rank may call before all ranks have made theirs.
        """
        with torch.cuda.device(device):
            self.one_shot = _open_one_shot(group, device, limits.one_shot, seconds)
            has_two_shot = group.size() in TWO_SHOT_SIZES and limits.two_shot > limits.one_shot
            self.two_shot = (
                TwoShotAllReduce(group, device, limits.two_shot) if has_two_shot else None
            )
            torch.cuda.synchronize()

    def __str__(self) -> str:
        one_shot = f"one-shot kernel to {self.one_shot.capacity >> 10} KiB"
        two_shot = f", two-shot to {self.two_shot.capacity >> 10} KiB" if self.two_shot else ""
        return f"{one_shot}{two_shot}, nccl above"

    def find(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The way for x; None: NCCL's. Sizes and dtypes decide, which are those of all ranks."""
        if fits(x, ONE_SHOT_DTYPES, self.one_shot.capacity):
            return self.one_shot
        if self.two_shot is not None and fits(x, TWO_SHOT_DTYPES, self.two_shot.capacity):
            return self.two_shot
        return None

    def adds(self, x: Tensor, residual: Tensor) -> bool:
        """True where the one-shot kernel sums x and adds the residual."""
        capacity = self.one_shot.capacity
        return fits(x, ONE_SHOT_DTYPES, capacity) and fits(residual, (x.dtype,), capacity)


def _open_one_shot(
    group: dist.ProcessGroup, device: torch.device, limit: int, seconds: float
) -> OneShotAllReduce:
    from nanovllm_executor_parallel.one_shot import BLOCK, NUM_SLOTS, SENTINEL, OneShotAllReduce

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    words = limit // (4 * BLOCK) * BLOCK  # whole blocks, by which a slot is cleared
    slots = _empty((NUM_SLOTS, group.size(), words), torch.int32, device)
    slots.fill_(SENTINEL)
    peers = torch.tensor(_rendezvous(slots, group), device=device)
    max_programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    return OneShotAllReduce(group.rank(), slots, peers, seconds, max_programs)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that other ranks can reach once it has met theirs."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.empty(*shape, dtype=dtype, device=device)


def _rendezvous(memory: Tensor, group: dist.ProcessGroup) -> list[int]:
    """The addresses of all ranks' memory, as this rank reaches it; torch keeps them valid."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(memory, group)
    return [
        handle.get_buffer(rank, tuple(memory.shape), memory.dtype).data_ptr()
        for rank in range(group.size())
    ]
