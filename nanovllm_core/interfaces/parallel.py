"""A worker's place among the ranks that run one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class TensorParallel(Protocol):
    """The group of ranks that share every layer. All ranks call the same collectives in order.

    Called in a layer's forward and by the sampler, so captured in decode steps on CUDA; and after a
    step, where a row needs the eager tail.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank, in the model's dtype or float32; may overwrite `x`."""

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual, equal on all ranks, plus the sum; may overwrite both. May round twice."""
        return residual.add_(self.all_reduce(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, of equal shapes, side by side along the last dimension.

        In the model's dtype, float32 or int32, and bit by bit: ranks compare what they get.
        """


@runtime_checkable
class NormingParallel(TensorParallel, Protocol):
    """A group that can sum over ranks and norm the sum in one operation."""

    def all_reduce_add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """What `all_reduce_add` returns, and its norm [T, E], as `KernelSet.rms_norm`.

        None, on all ranks, where the group has nothing for such rows, or the norm would be a part
        of the product behind it. Then nothing was done, and the layer calls the others.
        """


@dataclass(frozen=True, slots=True)
class SingleRank(TensorParallel):
    """A group of one."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """What a worker knows of the other ranks; made in its own process.

    `rank` is this worker's number, from 0, of `world_size`. `device` ("cuda:1") is where it runs;
    None: where the set-up says. `tensor_parallel` is the group that shares the model's layers.
    `min_over_ranks` returns the smallest of the numbers that all ranks pass; every rank calls it
    equally often. The worker calls `connect` once, when its GPU is open, so that the memory which
    connections take there is counted. All three must raise ExecutorError where a rank does not come
    in time.
    """

    rank: int = 0
    world_size: int = 1
    device: str | None = None
    tensor_parallel: TensorParallel = field(default_factory=SingleRank)
    min_over_ranks: Callable[[int], int] = field(default=lambda number: number, repr=False)
    connect: Callable[[], None] = field(default=lambda: None, repr=False)


SINGLE = ParallelContext()
"""One rank alone."""
