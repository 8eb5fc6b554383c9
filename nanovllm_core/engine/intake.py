"""What a step's results change: ids that are known, blocks that can be shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.engine.planner import PlannedStep, Planner
from nanovllm_core.engine.request import Request
from nanovllm_core.interfaces.plan import StepResult


class Intake:
    """Takes the tokens of steps into the rows of one engine."""

    def __init__(self, planner: Planner) -> None:
        self.num_output_tokens = 0
        self._planner = planner
        self._rows = planner.rows
        self._kv = planner.kv

    def take(
        self, planned: PlannedStep, result: StepResult, ended: set[int], now: float
    ) -> Sequence[tuple[int, Request]]:
        """Accept the tokens of one step, which came at `now`, and share the blocks they fill.

        Returns the entries that are watched or `ended`, each with its request, without those of
        rows that changed hands.
        """
        batch, token_ids = planned.batch, result.token_ids
        self.num_output_tokens += self._rows.accept_batch(batch, result)
        news: Sequence[tuple[int, Request]] = ()
        if ended or batch.watched or planned.chunks:
            news = tuple(self._news(planned, token_ids, ended, now))
        for row in self._rows.rows_with_full_block(self._kv.block_size):
            request = self._planner.running[row]
            self._planner.publish(request, int(self._rows.known[row]) - 1)
        return news

    def _news(
        self, planned: PlannedStep, token_ids: NDArray[np.int32], ended: set[int], now: float
    ) -> Iterator[tuple[int, Request]]:
        """First tokens of prompts are accepted here; what a prompt has computed is published."""
        batch = planned.batch
        entry = len(batch.rows)
        for decoded in sorted(ended.union(batch.watched)):
            if decoded < entry:
                row = int(batch.rows[decoded])
                if self._rows.generation[row] == batch.generations[decoded]:
                    yield decoded, self._planner.running[row]
        for prompt in planned.chunks:
            request, chunk = prompt.request, prompt.chunk
            if self._rows.generation[chunk.row] == prompt.generation:
                if request.block_tables:  # It may have been preempted while this was in flight.
                    self._planner.publish(request, chunk.start + chunk.length)
                if chunk.samples:
                    self._accept_first(request, int(token_ids[entry]), now)
                    if entry in ended or request.is_watched:
                        yield entry, request
            entry += chunk.samples

    def take_back(self, request: Request) -> None:
        """The newest id of a request that ends now does not count."""
        self._rows.known[request.row] -= 1
        self.num_output_tokens -= 1

    def _accept_first(self, request: Request, token_id: int, now: float) -> None:
        """The prompt is computed and gave a token; from now on decoding fills the blocks."""
        publishes = request.block_tables and self._kv.prefix_caching
        self._rows.accept_first(request.row, token_id, self._kv.block_size if publishes else 0)
        self.num_output_tokens += 1
        if request.first_token_time is None:
            request.first_token_time = now
