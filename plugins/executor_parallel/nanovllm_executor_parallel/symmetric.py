"""All-reduces over memory that the GPUs of all ranks write: the ways besides NCCL, and limits.

The memory is torch's symmetric memory, whose API is marked alpha: no other module uses it. Neither
NVLink multicast nor its operations (`multimem_*`) are used; TORCH_SYMM_MEM_DISABLE_MULTICAST is set
for the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm_executor_parallel.slots import Bound, SlotAllReduce

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MEASURED_CAPABILITY = (9, 0)
"""The least compute capability of GPUs that were measured."""

PROGRAMS_PER_MULTIPROCESSOR = 16
"""Of a kernel, with one warp each. All must be resident, beside another kernel's."""

PIECE_BYTES = 16 << 20
"""A larger x goes in pieces of this size, which are as fast as larger ones."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest x of each way, in bytes. NCCL takes what is larger.

    Two-shot is not used unless its limit is above the other. `one_shot` 0: NCCL takes all. From
    `norm_from` bytes on a kernel norms the sum too; less is faster in two.
    """

    one_shot: int
    two_shot: int
    norm_from: int


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
    return min(((n, x) for n, x in listed.items() if n >= size), default=(0, Limits(0, 0, 0)))[1]


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


class SymmetricAllReduce:
    """The ways of a rank over symmetric memory. Every rank makes one, at the same time."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, limits: Limits, seconds: float
    ) -> None:
        """Take the memory; `seconds` bounds each wait on the device.

        No rank may call before all ranks have made theirs.
        """
        from nanovllm_executor_parallel.one_shot import OneShotAllReduce
        from nanovllm_executor_parallel.slots import Bound
        from nanovllm_executor_parallel.two_shot import TwoShotAllReduce

        kinds: list[tuple[type[SlotAllReduce], int]] = [(OneShotAllReduce, limits.one_shot)]
        if limits.two_shot > limits.one_shot:
            kinds.append((TwoShotAllReduce, limits.two_shot))
        with torch.cuda.device(device):
            self._bound = Bound(seconds, device)
            self.ways = [_open(kind, limit, group, device, self._bound) for kind, limit in kinds]
            self._limits = [limit for _, limit in kinds]
            self._norm_from = limits.norm_from
            torch.cuda.synchronize()

    def __str__(self) -> str:
        ways = zip(self.ways, self._limits, strict=True)
        return ", ".join(
            [*(f"{way.name} kernel to {_shown(limit)}" for way, limit in ways), "nccl above"]
        )

    def find(self, x: Tensor, residual: Tensor | None = None) -> SlotAllReduce | None:
        """The way for x and a residual; None: NCCL's.

        Sizes and dtypes decide, which are those of all ranks.
        """
        for way, limit in zip(self.ways, self._limits, strict=True):
            if fits(x, DTYPES, limit) and (residual is None or fits(residual, (x.dtype,), limit)):
                return way
        return None

    def find_for_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor
    ) -> SlotAllReduce | None:
        """The way for x, a residual and the norm of their sum; None: apart."""
        if x_TE.nbytes < self._norm_from or weight_E.dtype not in (x_TE.dtype, torch.float32):
            return None
        way = self.find(x_TE, residual_TE)
        return way if way is not None and way.takes_rows_of(x_TE[0].nbytes) else None

    def bound(self, seconds: float) -> None:
        """Bound the waits of later calls."""
        self._bound.set(seconds)

    def missing(self) -> tuple[str, int, int] | None:
        """The way that has waited in vain, for which rank, and in which of its calls, from 0."""
        for way in self.ways:
            if (found := way.missing()) is not None:
                return way.name, *found
        return None


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >> 20 else f"{num_bytes >> 10} KiB"


def _open(
    kind: type[SlotAllReduce],
    limit: int,
    group: dist.ProcessGroup,
    device: torch.device,
    bound: Bound,
) -> SlotAllReduce:
    from nanovllm_executor_parallel.slots import SENTINEL

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    slots = _empty(kind.slots_shape(group.size(), min(limit, PIECE_BYTES)), torch.int32, device)
    slots.fill_(SENTINEL)
    peers = torch.tensor(_rendezvous(slots, group), device=device)
    max_programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    return kind(group.rank(), slots, peers, bound, max_programs)


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
