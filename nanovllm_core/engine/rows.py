"""The host's truth about rows, as arrays, so that a steady step costs the same at any batch.

R rows, L ids per row at most. A decoding row needs Python only where its scheduled length meets
`due_at` (it needs a block, or everything is planned) or its known length meets `publish_at` (a
block is full and may be shared).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.errors import InconsistentStateError
from nanovllm_core.interfaces.plan import StepResult

NEVER = -1


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The decoding rows, unchanged from step to step until one joins or leaves.

    `version` is the row table's at which every generation in `generations` was last seen to be
    alive; `watched` are the entries whose every token needs Python (streaming, stop strings, ...).
    """

    rows: NDArray[np.intp]
    generations: NDArray[np.int64]
    version: int
    watched: tuple[int, ...]


class RowTable:
    """Rows 0 to R - 1 and what is known of their requests.

    `known` ids are on the host, `scheduled` positions are computed or planned. `generation` counts
    the requests a row has had, so that a result that comes late can be told from its successor's.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = num_rows
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.known = np.zeros(num_rows, dtype=np.int64)
        self.scheduled = np.zeros(num_rows, dtype=np.int64)
        self.generation = np.zeros(num_rows, dtype=np.int64)
        self.decoding = np.zeros(num_rows, dtype=np.int64)
        self.watched = np.zeros(num_rows, dtype=np.bool_)
        self.constrained = np.zeros(num_rows, dtype=np.bool_)
        self.due_at = np.full(num_rows, NEVER, dtype=np.int64)
        self.publish_at = np.full(num_rows, NEVER, dtype=np.int64)
        self._due = np.zeros(num_rows, dtype=np.bool_)
        self.free = list(range(num_rows))[::-1]
        self.version = 0
        """Grows whenever a row changes hands."""

    # -- a row changes hands

    def acquire(self, token_ids: NDArray[np.int32], num_computed: int, watched: bool) -> int:
        """Take a free row for known ids whose first `num_computed` positions have KV already."""
        row = self.free.pop()
        self.token_ids[row, : len(token_ids)] = token_ids
        self.known[row] = len(token_ids)
        self.scheduled[row] = num_computed
        self.watched[row] = watched
        return row

    def release(self, row: int) -> None:
        """Take the row back; results in flight for it are stale from now on."""
        self.generation[row] += 1
        self.version += 1
        self.decoding[row] = 0
        self.due_at[row] = self.publish_at[row] = NEVER
        self.free.append(row)

    # -- decoding

    def accept_first(self, row: int, token_id: int, block_size: int) -> None:
        """The id that a prompt gave; from now on decoding fills blocks, `block_size` 0 for none."""
        num_computed = int(self.known[row])
        self.token_ids[row, num_computed] = token_id
        self.known[row] += 1
        if block_size:
            self.publish_at[row] = (num_computed // block_size + 1) * block_size + 1

    def make_batch(self) -> DecodeBatch:
        """The rows that decode now."""
        rows = np.flatnonzero(self.decoding)
        watched = tuple(np.flatnonzero(self.watched[rows]).tolist())
        return DecodeBatch(rows, self.generation[rows], self.version, watched)

    def rows_due(self) -> Sequence[int]:
        """Decoding rows that need a block, or whose every output is planned."""
        return self._rows_where_equal(self.scheduled, self.due_at)

    def rows_due_within(self, steps: int) -> list[int]:
        """Decoding rows that are not due yet and will be in at most `steps` steps."""
        left = self.due_at - self.scheduled
        rows: list[int] = np.flatnonzero((left > 0) & (left <= steps)).tolist()
        return rows

    def rows_with_full_block(self, block_size: int) -> Sequence[int]:
        """Rows whose KV has just filled a block; the next block becomes the one to wait for."""
        due = self._rows_where_equal(self.known, self.publish_at)
        if due:
            self.publish_at[due] += block_size
        return due

    def accept_batch(self, batch: DecodeBatch, result: StepResult) -> int:
        """One more id is known of every row of the batch; returns how many were not stale.

        Of a row that was left no id it is -1, and the row is finished.
        """
        rows = batch.rows
        token_ids, finished = result.token_ids[: len(rows)], result.finished[: len(rows)]
        if batch.version != self.version:
            alive = self.generation[rows] == batch.generations
            if alive.all():
                batch.version = self.version
            else:
                rows, token_ids, finished = rows[alive], token_ids[alive], finished[alive]
        if np.count_nonzero(token_ids < 0) and np.count_nonzero(token_ids[finished == 0] < 0):
            raise InconsistentStateError(
                f"the executor returned padding for a running row: {token_ids.tolist()} for rows "
                f"{rows.tolist()}"
            )
        known = self.known[rows]
        self.token_ids[rows, known] = token_ids
        self.known[rows] = known + 1
        return len(rows)

    def _rows_where_equal(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> Sequence[int]:
        np.equal(a, b, out=self._due)
        if not np.count_nonzero(self._due):
            return ()
        rows: list[int] = np.flatnonzero(self._due).tolist()
        return rows
