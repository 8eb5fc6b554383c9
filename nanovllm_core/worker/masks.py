"""The second part of a step: masks that the host made while the forward pass ran.

A step whose rows are all free needs none of this. One with a constrained row runs the same graph,
in which the sampler is off as for every tail; its tail waits for the masks of these rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.errors import InconsistentStateError, shown
from nanovllm_core.interfaces.plan import RowSampling, TokenMasks, mask_words
from nanovllm_core.worker.batch import StepInputs
from nanovllm_core.worker.logits import StepRows
from nanovllm_core.worker.results import LogprobTensors


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A step whose forward pass is launched and whose tail is not.

    Its entries are the first `num_rows` of `inputs`. `rows` are theirs, -1 for padding, and
    `sampling` what these ask for, both empty where no row needs the eager tail. `entries` are those
    to report, None for all. `constrained` are the rows whose masks may come. `logprobs` are those
    that the captured tail leaves. Steps of one `kind` take about the same time.
    """

    inputs: StepInputs
    num_rows: int
    rows: tuple[int, ...]
    sampling: tuple[RowSampling, ...]
    constrained: tuple[int, ...]
    entries: NDArray[np.int64] | None = None
    logprobs: Sequence[LogprobTensors] = ()
    kind: Hashable = None


class MaskTable:
    """The ids that each row may choose, on the device: int32 [R, W], W = ceil(V / 32) words."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        words = mask_words(vocab_size)
        self._allowed_RW = torch.full((num_rows, words), -1, dtype=torch.int32, device=device)
        bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
        self._bits = torch.from_numpy(bits).to(device)

    @torch.inference_mode()
    def load(self, masks: TokenMasks, step: ForwardPass) -> None:
        """Copy these masks into the table, in one copy that the host does not wait for.

        Raises InconsistentStateError for rows that `step` does not have and for other shapes.
        """
        rows, shape = masks.rows.tolist(), (len(masks.rows), self._allowed_RW.shape[1])
        if len(set(rows)) != len(rows) or not set(rows) <= set(step.constrained):
            raise InconsistentStateError(
                f"masks came for rows {shown(rows)}, but the step waits for those of rows "
                f"{shown(list(step.constrained))}, each once at most"
            )
        if masks.allowed.shape != shape or masks.allowed.dtype != np.int32:
            raise InconsistentStateError(
                f"the masks are {masks.allowed.dtype} {list(masks.allowed.shape)}; {shape[0]} rows "
                f"of {self._vocab_size} ids are int32 {list(shape)}"
            )
        if not rows:
            return
        packed = torch.from_numpy(np.concatenate([masks.rows, masks.allowed.ravel()]))
        if self._allowed_RW.is_cuda:
            packed = packed.pin_memory().to(self._allowed_RW.device, non_blocking=True)
        which, allowed = packed[: len(rows)].long(), packed[len(rows) :].view(shape)
        self._allowed_RW.index_copy_(0, which, allowed)

    def forbid(self, logits_SV: Tensor, step: StepRows, which_N: Tensor) -> None:
        """-inf for the ids that the rows' masks do not allow; an operation as in `logits`."""
        allowed_NW = self._allowed_RW[step.rows[which_N]]
        forbidden_NV = (allowed_NW[:, :, None] & self._bits == 0).flatten(1)[:, : self._vocab_size]
        logits_NV = logits_SV[which_N].masked_fill_(forbidden_NV, -torch.inf)
        logits_SV.index_copy_(0, which_N, logits_NV)
