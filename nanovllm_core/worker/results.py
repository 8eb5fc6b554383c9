"""Results on their way to the host: asynchronous copies, read in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import ExecutorError
from nanovllm_core.interfaces.plan import StepResult, TokenLogprobs
from nanovllm_core.worker.sampler import LogprobTensors


@dataclass(slots=True)
class _Pending:
    """One step in flight: where its [B, 2] result lands and which entries the engine asked for."""

    landing: NDArray[np.int32]
    ready: torch.cuda.Event | None
    entries: NDArray[np.int64] | None
    logprobs: LogprobTensors | None


class ResultQueue:
    """Copies each step's result to pinned memory; `collect` waits for the oldest only.

    `num_slots` bounds the steps in flight; the engine never has more than its depth.
    """

    def __init__(self, device: torch.device, max_rows: int, num_slots: int) -> None:
        cuda = device.type == "cuda"
        self._slots = torch.empty((num_slots, max_rows, 2), dtype=torch.int32, pin_memory=cuda)
        self._slots_host = self._slots.numpy()
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if cuda else None
        self._pending: deque[_Pending] = deque()
        self._next = 0

    def push(
        self,
        result_B2: Tensor,
        entries: NDArray[np.int64] | None = None,
        logprobs: LogprobTensors | None = None,
    ) -> None:
        """Send a step's result on its way. `entries` picks the batch entries to report, None all."""
        num_slots = self._slots.shape[0]
        if len(self._pending) == num_slots:
            raise ExecutorError(
                f"{num_slots} steps are in flight and none was collected; collect() before submit()"
            )
        slot, num_rows = self._next, result_B2.shape[0]
        self._next = (slot + 1) % num_slots
        self._slots[slot, :num_rows].copy_(result_B2, non_blocking=True)
        if logprobs is not None:
            logprobs = logprobs.to_host()
        event = None
        if self._events is not None:
            event = self._events[slot]
            event.record()
        self._pending.append(_Pending(self._slots_host[slot, :num_rows], event, entries, logprobs))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""
        if not self._pending:
            raise ExecutorError("no step is in flight; submit() a plan before collect()")
        step = self._pending.popleft()
        if step.ready is not None:
            step.ready.synchronize()
        landed = step.landing if step.entries is None else step.landing[step.entries]
        logprobs = _by_entry(step.logprobs, step.entries)
        # A copy, because the slot is written again a few steps later.
        return StepResult(landed[:, 0].copy(), landed[:, 1].astype(np.bool_), logprobs)

    def clear(self) -> None:
        """Forget steps in flight."""
        self._pending.clear()


def _by_entry(
    logprobs: LogprobTensors | None, entries: NDArray[np.int64] | None
) -> Mapping[int, TokenLogprobs]:
    """Logprobs keyed by their place in the reported result."""
    if logprobs is None:
        return {}
    by_batch_entry = logprobs.to_records()
    if entries is None:
        return by_batch_entry
    place: Sequence[int] = entries.tolist()
    return {i: by_batch_entry[e] for i, e in enumerate(place) if e in by_batch_entry}
