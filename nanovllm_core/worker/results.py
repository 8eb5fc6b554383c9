"""Results on their way to the host: the device writes them into pinned memory, the host reads them.

The last kernel of a step writes each entry's id and finish flag as one 64-bit word into a ring of
pinned memory, together with the step's tag. A word is written whole, so a row of words that all
bear the tag is a complete result: no copy is launched, no event is recorded, and the host waits by
looking (see `polling`). On a CPU the ring is ordinary memory and the result is there at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import ExecutorError
from nanovllm_core.interfaces.plan import StepResult, TokenLogprobs
from nanovllm_core.worker.polling import StepWait, Wait

TAG_BITS = 30
"""A word is tag << 32 | (id + 1) << 1 | finished; tags count steps from 1 and wrap."""


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


@dataclass(slots=True, eq=False)
class _Pending:
    """One step in flight: its words, the tag they will bear, and what the engine asked for."""

    kind: Hashable
    words: NDArray[np.int64]
    tag: int
    launched: float
    entries: NDArray[np.int64] | None
    logprobs: Sequence[LogprobTensors]
    logprobs_ready: torch.cuda.Event | None

    def is_done(self) -> bool:
        """True once every word bears the tag."""
        # The last entry is looked at alone, because looking at all of them costs more.
        return int(self.words[-1]) >> 32 == self.tag and bool((self.words >> 32 == self.tag).all())

    def logprobs_by_place(self) -> Mapping[int, TokenLogprobs]:
        """Log-probabilities keyed by their place in the reported result."""
        if not self.logprobs:
            return {}
        if self.logprobs_ready is not None:
            self.logprobs_ready.synchronize()
        by_entry = {e: one for part in self.logprobs for e, one in part.to_records().items()}
        if self.entries is None:
            return by_entry
        return {i: by_entry[e] for i, e in enumerate(self.entries.tolist()) if e in by_entry}


class ResultRing:
    """Words of the last `num_slots` steps; the device counts the steps it has finished.

    `num_slots` bounds the steps in flight. Every submitted step runs `finish_step` exactly once to
    effect, so the host's count and the device's agree.
    """

    def __init__(self, device: torch.device, max_rows: int, num_slots: int) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        """Of the steps; whoever collects may be on another."""
        self.words = torch.zeros((num_slots, max_rows), dtype=torch.int64, pin_memory=self._cuda)
        self.num_finished = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = self.words.numpy()
        self._pending: deque[_Pending] = deque()
        self._num_pushed = 0
        self.num_overlapped = self.num_late = 0
        """Steps launched with another in flight; of these, those that the device waited for."""
        self.wait: Wait = StepWait()

    def _is_idle(self) -> bool:
        return self._stream is None or self._stream.query()

    def reset(self) -> None:
        """Forget all steps, after runs that no plan asked for (a capture)."""
        if self._cuda:
            torch.cuda.synchronize()
        self.words.zero_()
        self.num_finished.zero_()
        self._pending.clear()
        self._num_pushed = self.num_overlapped = self.num_late = 0

    def push(
        self,
        num_rows: int,
        entries: NDArray[np.int64] | None = None,
        logprobs: Sequence[LogprobTensors] = (),
        kind: Hashable = None,
    ) -> None:
        """A step of `num_rows` entries was launched; `entries` picks those to report, None all.

        Each of `logprobs` has entries of its own. Steps of one `kind` take about the same time.
        """
        num_slots = len(self._host)
        if len(self._pending) == num_slots:
            raise ExecutorError(
                f"{num_slots} steps are in flight and none was collected; collect() before submit()"
            )
        if self._pending:
            self.num_overlapped += 1
            self.num_late += self._pending[-1].is_done()
        words = self._host[self._num_pushed % num_slots, :num_rows]
        self._num_pushed += 1
        ready = None
        if logprobs:
            logprobs = [part.to_host() for part in logprobs]
            if self._cuda:
                ready = torch.cuda.current_stream().record_event()
        tag = self._num_pushed & ((1 << TAG_BITS) - 1)
        launched = perf_counter()
        self._pending.append(_Pending(kind, words, tag, launched, entries, logprobs, ready))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""
        if not self._pending:
            raise ExecutorError("no step is in flight; submit() a plan before collect()")
        step = self._pending[0]
        self.wait(step.kind, step.launched, step.is_done, self._check_oldest)
        words = step.words if step.entries is None else step.words[step.entries]
        low = words.astype(np.int32)  # the low halves, copied before the slot is written again
        result = StepResult((low >> 1) - 1, (low & 1).astype(np.bool_), step.logprobs_by_place())
        # Only now: whatever was interrupted can be taken up again. `del` is no call, after which a
        # Ctrl-C could come between the step's leaving and its result's.
        del self._pending[0]
        return result

    def _check_oldest(self) -> None:
        """ExecutorError if the device has stopped without writing the oldest step's words."""
        step = self._pending[0]
        if self._is_idle() and not step.is_done():
            raise ExecutorError(
                f"the device is idle, but step {step.tag} left no result; an earlier kernel "
                "failed, or a plan without rows was submitted"
            )
