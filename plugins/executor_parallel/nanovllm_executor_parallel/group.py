"""The ranks as a torch.distributed group: gloo between CPUs, NCCL and `symmetric` between GPUs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_core.api import ParallelContext
from nanovllm_executor_parallel.messages import HOST, LostPeerError, Start, Status
from nanovllm_executor_parallel.plugin import AllReduce
from nanovllm_executor_parallel.symmetric import (
    SymmetricAllReduce,
    find_obstacle,
    find_unmeasured,
    read_limits,
)

logger = logging.getLogger(__name__)

# torch renames it; the older versions know the first name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PROBES = (1, 1 << 16, 1 << 22)
"""Numbers in the first all-reduces: NCCL takes an algorithm by size, and connects it when used."""

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
        self.symmetric: SymmetricAllReduce | None = None
        self.all_reduces = "all-reduces: gloo, on CPUs"
        """Who does them, in words; on GPUs known once they are open."""
        self._progress = progress
        self._seconds = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        way = None if self.symmetric is None else self.symmetric.find(x)
        with self._progress.collective("all_reduce"):
            if way is not None:
                return way(x)
            dist.all_reduce(x)
        return x

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual plus the sum over ranks, in its place; one kernel up to the limits."""
        way = None if self.symmetric is None else self.symmetric.find(x, residual)
        if way is None:
            return residual.add_(self.all_reduce(x))
        with self._progress.collective("all_reduce"):
            return way(x, residual)

    def all_reduce_add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """As `all_reduce_add`, and the norm of the sum; None where no kernel does both."""
        if self.symmetric is None:
            return None
        way = self.symmetric.find_for_norm(x_TE, residual_TE, weight_E)
        if way is None:
            return None
        with self._progress.collective("all_reduce"):
            return residual_TE, way.add_norm(x_TE, residual_TE, weight_E, eps)

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

    def open(self, devices: Sequence[torch.device], seconds: float, all_reduce: AllReduce) -> None:
        """Take the memory that collectives need on GPUs, which no capture may do.

        `devices` are the GPUs of all ranks. All of them use symmetric memory, or none does;
        `seconds` bounds the waits in it.
        """
        with self._progress.collective("open"):
            for numel in PROBES:
                probe = torch.zeros(numel, dtype=torch.bfloat16, device=devices[self.rank])
                dist.all_reduce(probe)
        self.all_gather(probe[:1])
        if all_reduce == "nccl":
            self.all_reduces = "all-reduces: nccl"
            return
        is_auto = all_reduce == "auto"
        obstacle = find_unmeasured(devices, self.rank) if is_auto else ""
        # It is worth a warning only if it was asked for by name.
        level = logging.INFO if is_auto else logging.WARNING
        self._open_symmetric(devices, seconds, obstacle, level)

    def _open_symmetric(
        self, devices: Sequence[torch.device], seconds: float, obstacle: str, level: int
    ) -> None:
        """Take symmetric memory on all ranks, or on none and log the reason."""
        obstacle = obstacle or find_obstacle(devices, self.rank)
        if self.min_over_ranks(int(not obstacle)):
            try:
                self.symmetric = self._make_symmetric(devices[self.rank], seconds)
            except RuntimeError as error:
                obstacle = str(error)
        # Also the barrier before the first call.
        if not self.min_over_ranks(int(self.symmetric is not None)):
            self.symmetric = None
            reason = obstacle or "another rank cannot use symmetric memory"
            self.all_reduces = f"all-reduces: nccl; {reason}"
            logger.log(level, "%s", self.all_reduces)
        else:
            self.all_reduces = f"all-reduces: {self.symmetric}"

    def _make_symmetric(self, device: torch.device, seconds: float) -> SymmetricAllReduce:
        assert dist.group.WORLD is not None
        self._seconds = seconds
        limits = read_limits(self.size)
        return SymmetricAllReduce(dist.group.WORLD, device, limits, seconds)

    def bound(self, seconds: float) -> None:
        """Bound the waits on the device from here on; those of NCCL have no bound."""
        if self.symmetric is not None:
            self._seconds = seconds
            self.symmetric.bound(seconds)

    def check(self) -> None:
        """LostPeerError if the device has waited in vain in a step that has ended."""
        missing = None if self.symmetric is None else self.symmetric.missing()
        if missing is not None:
            way, rank, call = missing
            raise LostPeerError(
                f"{way} all_reduce {call + 1} on the device: rank {rank} did not come within "
                f"{self._seconds:g} s; raise stall_seconds if it was only slow"
            )


def rank_device(device: str, rank: int) -> str:
    """`cuda:1` and rank 2 -> `cuda:3`; all ranks share a CPU."""
    kind, _, first = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(first or 0) + rank}"


def connect(start: Start, device: str, progress: Progress) -> ParallelContext:
    """This rank's context, once it has met the others; LostPeerError if they do not come."""
    devices = [rank_device(device, rank) for rank in range(start.world_size)]
    if start.world_size == 1:
        return ParallelContext(device=devices[0])
    return join(start, devices, progress)


def join(start: Start, devices: Sequence[str], progress: Progress) -> ParallelContext:
    """Meet the other ranks at the port of rank 0, which listens there already."""
    group = TensorParallelGroup(start.rank, start.world_size, progress)
    device = devices[start.rank]
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
        group.open([*map(torch.device, devices)], start.timeout_seconds, start.all_reduce)

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
