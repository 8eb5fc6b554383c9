"""Steps with prompt chunks: their sizes, and their chunks as one table on the device.

Decode entries come first, one token each, then the chunks, packed. A step that is captured is
padded at three places: decode entries to one of a few sizes, the last of which holds every row;
prompt tokens to one of the configured sizes; and chunks to as many as fill these tokens with short
prompts. Padding passes through the layers, but it stores no key, advances no row, and is left out
of the result.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.interfaces.attention import PrefillMetadata
from nanovllm_core.interfaces.plan import PrefillChunk, StepPlan
from nanovllm_core.worker.batch import StepInputs, aligned
from nanovllm_core.worker.graphs import StepKey

_FIRST_ROWS = 8
_ROWS_APART = 16
_MOST_FULL_STEPS = 16


def mixed_keys(
    prompt_sizes: Sequence[int],
    full_step: int | None,
    max_rows: int,
    max_model_len: int,
    most_tokens: int = sys.maxsize,
) -> tuple[StepKey, ...]:
    """Every captured step with prompts, of at most `most_tokens`; none where there are no sizes.

    Where steps are small, padding is no small part of them: those that fill the budget, of
    `full_step` tokens, have graphs of their own.
    """
    full = _full_steps(full_step, max_rows) if prompt_sizes and full_step else ()
    keys = dict.fromkeys((*_padded_steps(prompt_sizes, max_rows, max_model_len), *full))
    return tuple(key for key in keys if key.num_tokens <= most_tokens)


def _padded_steps(
    prompt_sizes: Sequence[int], max_rows: int, max_model_len: int
) -> Iterator[StepKey]:
    """All token sizes at a few numbers of decode entries.

    Sizes beyond what the chunks can fill are left out. A padded entry costs its share of the
    products, little beside the prompt's tokens, and a graph costs time at start: so each number of
    entries is eight times the one before.
    """
    num_rows = min(_FIRST_ROWS, max_rows)
    while True:
        largest = num_rows * max_model_len
        sizes = prompt_sizes[: 1 + bisect_left(prompt_sizes, largest)]
        yield from (StepKey("mixed", size, num_rows) for size in sizes)
        if num_rows == max_rows:
            return
        num_rows = min(8 * num_rows, max_rows)


def _full_steps(full_step: int, max_rows: int) -> Iterator[StepKey]:
    """Steps whose decode entries, padded, and prompt tokens are `full_step` together."""
    yield StepKey("mixed", full_step, min(_FIRST_ROWS, max_rows))
    apart = rows_apart(max_rows)
    for num_rows in range(apart, max_rows + apart, apart):
        num_rows = min(num_rows, max_rows)
        if num_rows < full_step:
            yield StepKey("mixed", full_step - num_rows, num_rows)


def rows_apart(max_rows: int) -> int:
    """The multiples to which steps that fill the budget pad their decode entries."""
    sixteenth = -(-max_rows // _MOST_FULL_STEPS)
    return -(-sixteenth // _ROWS_APART) * _ROWS_APART


def chunk_table_shape(num_chunks: int) -> tuple[int, int]:
    """Of a `ChunkTable`. Each of its parts begins at an aligned address if the table does."""
    return 7, aligned(num_chunks + 1)


def pack_chunks(
    chunks: Sequence[PrefillChunk], num_entries: int, needs_tail: bool
) -> NDArray[np.int32]:
    """The input of `ChunkTable`, [7, W]. Entries beyond the chunks are chunks of no token."""
    num_chunks = len(chunks)
    lengths = [chunk.length for chunk in chunks]
    starts = np.cumsum([0, *lengths])
    packed = np.zeros(chunk_table_shape(num_entries), dtype=np.int32)
    packed[0, : num_chunks + 1] = starts
    packed[0, num_chunks + 1 :] = starts[-1]
    packed[1, :num_chunks] = [chunk.row for chunk in chunks]
    packed[2, :num_chunks] = [chunk.start for chunk in chunks]
    packed[3, :num_chunks] = lengths
    packed[4, :num_chunks] = starts[:-1]
    packed[5, :num_chunks] = [chunk.samples for chunk in chunks]
    packed[6, 0] = needs_tail
    return packed


def trial_chunks(
    num_tokens: int, max_rows: int, max_model_len: int, context: int
) -> tuple[PrefillChunk, ...]:
    """The largest chunks of a step of at most so many prompt tokens; none gives a token.

    With a `context`: of the fewest rows that can hold both, so many tokens lie before the chunks
    together. Where the rows cannot hold both, the context comes first.
    """
    start, length = 0, min(num_tokens, max_model_len)
    if context and num_tokens:
        max_rows = min(max_rows, num_tokens, -(-(num_tokens + context) // max_model_len))
        start = min(-(-context // max_rows), max_model_len - 1)
        length = min(num_tokens // max_rows, max_model_len - start)
    num_tokens = min(num_tokens, max_rows * length)
    return tuple(
        PrefillChunk(row, start, min(length, num_tokens - place), samples=False)
        for row, place in enumerate(range(0, num_tokens, max(length, 1)))
    )


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """S prompt chunks on the device, as `pack_chunks` laid them out; zeros are none."""

    packed: Tensor  # [7, W]
    num_chunks: int

    @property
    def query_start_loc(self) -> Tensor:
        """The start of each chunk's tokens among the prompt tokens, and the end of the last."""
        return self.packed[0, : self.num_chunks + 1]

    @property
    def chunks(self) -> Tensor:
        """[5, S]: row, first position, length, start among the prompt tokens, whether the end
        samples.
        """
        return self.packed[1:6, : self.num_chunks]

    @property
    def skip_sampler(self) -> Tensor:
        """`RowTables.skip_sampler` of this step: 1 where a tail follows."""
        return self.packed[6, :1]


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step with prompt chunks: `num_decode` entries of one token, then those of `chunks`.

    `max_query_len` and `max_seq_len` are the longest chunk and sequence, bounds of them where the
    step is captured. `num_context` are the tokens before all chunks, None in a captured step.
    """

    inputs: StepInputs
    num_decode: int
    chunks: ChunkTable
    max_query_len: int
    max_seq_len: int
    num_context: int | None = None

    @classmethod
    def captured(
        cls,
        key: StepKey,
        inputs: StepInputs,
        chunks: Mapping[int, Tensor],
        max_model_len: int,
    ) -> MixedStep:
        """The padded step of `key`, in the memory that its graph reads."""
        return cls(
            inputs.slice(slice(key.total_tokens), slice(key.num_rows + key.num_chunks)),
            key.num_rows,
            ChunkTable(chunks[key.num_chunks], key.num_chunks),
            max_query_len=min(key.num_tokens, max_model_len),
            max_seq_len=max_model_len,
        )

    @property
    def decode(self) -> StepInputs:
        """The entries of one token."""
        return self.inputs.slice(slice(self.num_decode), slice(self.num_decode))

    @property
    def prefill(self) -> StepInputs:
        """The entries of the chunks."""
        return self.inputs.slice(slice(self.num_decode, None), slice(self.num_decode, None))

    def prefill_metadata(self) -> list[PrefillMetadata]:
        """The chunks, for each cache group."""
        entries = self.prefill
        return [
            PrefillMetadata(
                block_table=block_table,
                seq_lens=entries.seq_lens,
                query_start_loc=self.chunks.query_start_loc,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
                num_context=self.num_context,
            )
            for block_table in entries.block_table.unbind()
        ]

    def reported(self, plan: StepPlan) -> NDArray[np.int64]:
        """The entries that get a token, in the order of the result."""
        is_reported = np.zeros(self.inputs.num_rows, dtype=np.bool_)
        is_reported[: plan.num_decode] = True
        is_reported[self.num_decode :][: len(plan.prefill)] = [c.samples for c in plan.prefill]
        return np.flatnonzero(is_reported)
