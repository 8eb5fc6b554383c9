"""A rank that notes what it sends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from nanovllm_core.interfaces.parallel import ParallelContext, TensorParallel
from nanovllm_kit.ranks import SimulatedRank


@dataclass
class Counted(TensorParallel):
    """A group that notes the bytes of each gathering that this rank sends."""

    group: SimulatedRank
    sent: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.group.all_reduce_add(x, residual)

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent.append(x.nbytes)
        return self.group.all_gather(x)

    def context(self) -> ParallelContext:
        """What a `Worker` of this rank is made with."""
        return replace(self.group.context(), tensor_parallel=self)
