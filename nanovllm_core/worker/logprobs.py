"""Log-probabilities of a step, on their way from the device to plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.interfaces.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities (nats) of the batch entries that asked, K columns or fewer for each.

    `token_logprobs` [N] and `top_logprobs` [N, K] are float32, `top_ids` [N, K] integers.
    `num_top[i]` of the K columns are what entry `entries[i]` asked for, at `places[i]` of the N.
    """

    entries: tuple[int, ...]
    num_top: tuple[int, ...]
    places: Sequence[int]
    token_logprobs: Tensor
    top_logprobs: Tensor
    top_ids: Tensor

    def to_host(self) -> LogprobTensors:
        """Start copies to pinned memory; they are there when the stream has come past them.

        On a CPU the copies are there at once; the next step may write these tensors again.
        """
        on_cuda = self.token_logprobs.is_cuda
        copies = (
            torch.empty(one.shape, dtype=one.dtype, pin_memory=on_cuda).copy_(
                one, non_blocking=True
            )
            for one in (self.token_logprobs, self.top_logprobs, self.top_ids)
        )
        return LogprobTensors(self.entries, self.num_top, self.places, *copies)

    def to_records(self) -> dict[int, TokenLogprobs]:
        """The same as plain data by batch entry; waits for the device unless on the host."""
        k = max(self.num_top)
        tokens = self.token_logprobs.tolist()
        ids, top = self.top_ids[:, :k].tolist(), self.top_logprobs[:, :k].tolist()
        return {
            entry: TokenLogprobs(tokens[i], tuple(zip(ids[i][:n], top[i][:n], strict=True)))
            for entry, n, i in zip(self.entries, self.num_top, self.places, strict=True)
        }
