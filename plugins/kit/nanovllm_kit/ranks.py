"""Tensor parallelism simulated by threads, one per rank, in one process and on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm_core.interfaces.parallel import ParallelContext

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Exchange:
    """Where the ranks meet: each puts its tensor down, then all read all of them."""

    size: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.tensors = [torch.empty(0)] * self.size

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = tensor
        self.barrier.wait(_TIMEOUT_S)
        tensors = list(self.tensors)
        self.barrier.wait(_TIMEOUT_S)
        return tensors


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One rank of a simulated group; see `nanovllm_core.layers.TensorParallel`."""

    rank: int
    size: int
    exchange: _Exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange.swap(self.rank, x.clone())).sum(dim=0)

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self.all_reduce(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.exchange.swap(self.rank, x.clone()), dim=-1)

    def min_over_ranks(self, number: int) -> int:
        """As `ParallelContext.min_over_ranks`."""
        return min(int(one) for one in self.exchange.swap(self.rank, torch.tensor(number)))

    def context(self) -> ParallelContext:
        """What a `Worker` of this rank is made with."""
        return ParallelContext(
            rank=self.rank,
            world_size=self.size,
            tensor_parallel=self,
            min_over_ranks=self.min_over_ranks,
        )


def run_ranks(size: int, function: Callable[[SimulatedRank], Result]) -> list[Result]:
    """Call `function` once per rank, at the same time; the results in the order of the ranks.

    The first rank's error that is not a broken barrier is raised.
    """
    exchange = _Exchange(size)

    def run(rank: int) -> Result:
        try:
            return function(SimulatedRank(rank, size, exchange))
        except BaseException:
            exchange.barrier.abort()  # the others wait for a rank that will not come
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
