"""The ranks as a torch.distributed group: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_core.api import ParallelContext
from nanovllm_executor_parallel.messages import HOST, LostPeerError, Start, Status

# torch renames it; the older versions know the first name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GLOO_CONNECTION = re.compile("gloo/(transport|rendezvous)/")
"""In the errors of its sockets: they name their source file."""


class Progress:
    """What this rank is doing, for a thread that answers the engine."""

    def __init__(self) -> None:
        self.status = Status()

    def begin(self, doing: str) -> None:
        """The rank's main thread begins to do this."""
        self.status = replace(self.status, doing=doing)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Around a collective, which waits for the other ranks."""
        before = self.status
        self.status = replace(before, waiting_in=name)
        try:
            yield
        except RuntimeError as error:
            if not is_of_a_connection(error):
                raise
            raise LostPeerError(f"{name} {before.collectives + 1}: {error}") from error
        self.status = replace(before, collectives=before.collectives + 1)


def is_of_a_connection(error: RuntimeError) -> bool:
    """True for what torch raises where another rank has gone; gloo's errors have no type."""
    return isinstance(error, dist.DistError) or bool(GLOO_CONNECTION.search(str(error)))


class TensorParallelGroup:
    """The `TensorParallel` of a rank, over torch's default group."""

    def __init__(self, rank: int, size: int, progress: Progress) -> None:
        self.rank = rank
        self.size = size
        self._progress = progress

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        with self._progress.collective("all_reduce"):
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., X] of each rank -> [..., size * X]."""
        gathered = x.new_empty((self.size, *x.shape))
        with self._progress.collective("all_gather"):
            _all_gather(gathered.flatten(0, 1), x.contiguous())
        return gathered.movedim(0, -2).flatten(-2)

    def min_over_ranks(self, number: int) -> int:
        """The smallest number of any rank; over gloo, whatever the device."""
        numbers = torch.tensor([number])
        with self._progress.collective("min_over_ranks"):
            dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)


def rank_device(device: str, rank: int) -> str:
    """`cuda:1` and rank 2 -> `cuda:3`; all ranks share a CPU."""
    kind, _, first = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


def connect(start: Start, device: str, progress: Progress) -> ParallelContext:
    """This rank's context, once it has met the others; LostPeerError if they do not come."""
    device = rank_device(device, start.rank)
    if start.world_size == 1:
        return ParallelContext(device=device)
    return join(start, device, progress)


def join(start: Start, device: str, progress: Progress) -> ParallelContext:
    """Meet the other ranks at the port of rank 0, which listens there already."""
    group = TensorParallelGroup(start.rank, start.world_size, progress)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=start.timeout_seconds)
    with progress.collective("connect"):
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, says the manual
            HOST,
            start.port,
            start.world_size,
            is_master=start.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=start.listening,
        )
        dist.init_process_group(
            backend, store=store, rank=start.rank, world_size=start.world_size, timeout=timeout
        )

    def open_connections() -> None:
        """The first collectives: in them NCCL takes its memory, which no capture may do."""
        group.all_gather(group.all_reduce(torch.zeros(1, device=device)))

    return ParallelContext(
        rank=start.rank,
        world_size=start.world_size,
        device=device,
        tensor_parallel=group,
        min_over_ranks=group.min_over_ranks,
        connect=open_connections,
    )


def disconnect() -> None:
    """Leave the group."""
    if dist.is_initialized():
        dist.destroy_process_group()
