"""Log-probabilities of a step, on their way from the device to plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm_core.interfaces.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities (nats) of the batch entries that asked.

    `packed` is int32 [N, 1 + 2 K], its rows as in `CapturedTail.logprobs`; `num_top[i]` of the K
    pairs are what entry `entries[i]` asked for, in row `places[i]`.
    """

    entries: Sequence[int]
    num_top: Sequence[int]
    places: Sequence[int]
    packed: Tensor

    def to_host(self) -> LogprobTensors:
        """Start a copy to pinned memory; it is there when the stream has come past it.

        On a CPU the copy is there at once; the next step may write this tensor again.
        """
        copy = torch.empty_like(self.packed, device="cpu", pin_memory=self.packed.is_cuda)
        return replace(self, packed=copy.copy_(self.packed, non_blocking=True))

    def to_records(self) -> dict[int, TokenLogprobs]:
        """The same by batch entry; the copy must be there."""
        data, width = self.packed.numpy().tobytes(), self.packed[0].nbytes
        asked = zip(self.entries, self.num_top, self.places, strict=True)
        return {
            entry: TokenLogprobs.of_bytes(data[at * width : at * width + 4 * (1 + 2 * n)])
            for entry, n, at in asked
        }
