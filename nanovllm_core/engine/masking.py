"""The second part of a step: masks of its constrained rows, then the sampling."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from nanovllm_core.engine.constraints import Filling, MaskFiller
from nanovllm_core.engine.planner import PlannedStep, Planner
from nanovllm_core.engine.request import Request
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.interfaces.plan import TokenMasks, mask_words

logger = logging.getLogger(__name__)

Failed = tuple[Request, NanoVLLMError]


class Masking:
    """Makes the masks of a step once all ids before it are on the host."""

    def __init__(self, planner: Planner, vocab_size: int, seconds: float) -> None:
        self._planner = planner
        self._num_words = mask_words(vocab_size)
        self._filler = MaskFiller(seconds)

    def make(self, planned: PlannedStep) -> tuple[TokenMasks, list[Failed]]:
        """The masks of the step's requests that go on, and the requests that an error ends."""
        waiting = [
            (row, request, request.constraints)
            for row, request in self._alive(planned)
            if request.constraints is not None
        ]
        fillings = [
            Filling(
                sample,
                request.known_ids()[request.num_prompt_tokens + sample.num_taken :].tolist(),
                request.group_id,
            )
            for _, request, sample in waiting
        ]
        rows, masks, failed = [], [], []
        for (row, request, sample), filled in zip(
            waiting, self._filler.fill(fillings), strict=True
        ):
            if isinstance(filled, NanoVLLMError):
                logger.warning("request %s: %s", request.request_id, filled)
                failed.append((request, filled))
            else:
                sample.mask = filled
                rows.append(row)
                masks.append(filled)
        allowed = np.array(masks, np.int32).reshape(len(rows), self._num_words)
        return TokenMasks(rows=np.array(rows, np.int32), allowed=allowed), failed

    def _alive(self, planned: PlannedStep) -> Iterator[tuple[int, Request]]:
        """The watched rows of a step that get a token, with their requests; no row that is over."""
        generation, batch = self._planner.rows.generation, planned.batch
        for entry in batch.watched:
            row = int(batch.rows[entry])
            if generation[row] == batch.generations[entry]:
                yield row, self._planner.running[row]
        for prompt in planned.chunks:
            row = prompt.chunk.row
            if prompt.chunk.samples and generation[row] == prompt.generation:
                yield row, prompt.request
