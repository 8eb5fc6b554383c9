"""The contract of a sampler: it chooses one id per batch entry from the step's logits.

Who calls what, and when:

    Sampler(options, context)     once, at start, before the KV cache is sized and before capture
    sample(...)                   once per step, on the current stream: inside a captured graph or
                                  eagerly; and once more for the rows whose logits a step's tail
                                  has changed (penalties, top_k, processors)

Shape suffixes: B batch entries (at most `max_entries`), V vocabulary, R rows of the tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerContext:
    """The facts of the engine that a sampler is made with.

    `max_entries`: the most entries of a call, padding included.
    """

    device: torch.device
    vocab_size: int
    max_entries: int


class Sampler(ABC):
    """Greedy and temperature choice, on the device. One instance serves all steps of an engine.

    Every buffer that a captured call reads or writes, besides its arguments, is allocated when the
    instance is made.
    """

    def __init__(self, options: BaseModel, context: SamplerContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        temperature_R: Tensor,
        seed_R: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        """Write the id of each entry to `out_B` (int32).

        `logits_BV` in the model's dtype, or float32 from a tail; they must not be changed.
        `rows_B` int32: the entry's row in the tables; -1 is padding and gets -1.
        `temperature_R` float32; 0 selects the likeliest id, of equal ones the lowest.
        `seed_R` int64. `output_index_B` int32: the number of tokens that the entry already has.
        `skip` [1] int32: if it is 1, a tail follows that chooses again, and this result is not
        read.

        The choice for an entry may depend only on its own logits, temperature, seed and output
        index: not on other entries, its place, the batch size or earlier choices. So equal requests
        give equal tokens whatever else runs, and preempted requests continue unchanged.
        Each bit of the seed (0 to 2**63 - 1) and of the output index changes the noise, which is
        finer than bfloat16 whatever dtype the logits have.

        In a decode step on CUDA the call is captured and replayed: no wait for the device, no host
        values but shapes, no random state on the host.
        """

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The sampler's own tensors that captured calls use, by name.

        In debug mode the runner compares their addresses at capture and at replay.
        """
        return {}
