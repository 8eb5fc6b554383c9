"""The contract of a captured tail: sampling as each row asks, inside the captured step.

A kernel set may have one (`TailKernels`); without it, and for samplers of plugins, what greedy and
temperature do not cover is done eagerly after the step. What the rows ask for is in tables on the
device, so there is no graph per combination, and the host does nothing for a row after its
admission.

Shape suffixes: B batch entries (at most `max_entries`), V vocabulary, R rows of the tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class RowColumn(IntEnum):
    """The columns of `TailTables.parameters`; floats are stored by their bits.

    Of a row without flags only NUM_TOP is read: the log-probabilities that it asks for beside that
    of its token, -1 for none at all. No limit: a TOP_K of the vocabulary or more, a TOP_P above 1,
    a LOG_MIN_P of -inf. COUNTED is the tail's own, and -1 where a new request has got the row.
    """

    FLAGS = 0
    TOP_K = 1
    TOP_P = 2
    LOG_MIN_P = 3
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6
    NUM_TOP = 7
    NUM_BIASES = 8
    NUM_STOP_IDS = 9
    COUNTED = 10


class RowFlag(IntFlag):
    """What a row asks for: cuts, penalties, logit biases, no stop id before `min_tokens`."""

    CUT = 1
    PENALISED = 2
    BIASED = 4
    FORBIDS = 8


NUM_ROW_COLUMNS = 12
"""The columns of `TailTables.parameters`: those of `RowColumn`, and one that is free."""
MAX_ROW_BIASES = 1024
"""The logit biases of a row that the tables hold; rows with more need the eager tail."""
MAX_ROW_LOGPROBS = 20
"""The same of log-probabilities beside the token's."""
LOGPROB_COLUMNS = 1 + 2 * MAX_ROW_LOGPROBS
"""The numbers of `CapturedTail.logprobs` for each entry."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TailTables:
    """What the rows ask for and what they have, int32 but for two; the same memory in all steps."""

    parameters: Tensor  # [R, NUM_ROW_COLUMNS]
    biases: Tensor  # [R, 2, MAX_ROW_BIASES]: increasing ids, then biases by their bits
    stop_ids: Tensor  # [R, MAX_DEVICE_STOP_IDS], -1 where unused
    min_tokens: Tensor  # [R]
    num_prompt: Tensor  # [R]
    token_ids: Tensor  # [R, L]
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64


class CapturedTail(ABC):
    """Chooses the tokens of a step. Every buffer is allocated when it is made.

    After a call `logprobs`, int32 [max_entries, LOGPROB_COLUMNS], has for each entry that asks the
    log-probability of its token, then pairs of an id and its log-probability, the likeliest first:
    as many as it asks for. Log-probabilities are float32, stored by their bits.
    """

    logprobs: Tensor

    @abstractmethod
    def sample(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        """Write the id of each entry to `out_B` (int32), nothing at all if `skip` [1] is 1.

        As the built-in sampler does after bias, penalties, forbidden stop ids, and cuts by min_p,
        top_k and top_p, in this order; a row that asks for nothing gets the sampler's very token.
        `num_known_B`: the ids of each entry's row in `token_ids`. Captured; the rest is as in
        `Sampler.sample`.
        """

    @abstractmethod
    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tail's own tensors that captured calls use, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """What one of several ranks has of the logits: `num_ids` ids from `first_id` on.

    The logits have `num_columns`, the same on all ranks; those behind the ids are padding.
    """

    first_id: int
    num_ids: int
    num_columns: int


class ShardedTail(ABC):
    """A captured tail over ranks that have a part of the vocabulary each, and gather no logits.

    X columns of a `VocabShard`, P numbers of a part, N ranks. A row that is cut without a `top_k`,
    or by one above `max_top_k`, is left out: it needs all logits. The rest is as in `CapturedTail`.
    """

    max_top_k: int
    logprobs: Tensor

    @abstractmethod
    def find(
        self,
        logits_BX: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        skip: Tensor,
    ) -> Tensor:
        """This rank's part of each entry, int32 [B, P], the same memory in all calls."""

    @abstractmethod
    def choose(
        self,
        parts_NBP: Tensor,
        rows_B: Tensor,
        num_known_B: Tensor,
        output_index_B: Tensor,
        out_B: Tensor,
        skip: Tensor,
    ) -> None:
        """Write the id of each entry, of the parts of all ranks, one rank's behind the other's."""

    @abstractmethod
    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The tail's own tensors that captured calls use, by name."""


@runtime_checkable
class TailKernels(Protocol):
    """A kernel set that has a captured tail."""

    def make_tail(self, tables: TailTables, vocab_size: int, max_entries: int) -> CapturedTail:
        """A tail over these tables; called once, before the KV cache is sized."""


@runtime_checkable
class ShardedTailKernels(Protocol):
    """A kernel set that has a captured tail over ranks."""

    def make_sharded_tail(
        self, tables: TailTables, shard: VocabShard, max_entries: int
    ) -> ShardedTail:
        """As `TailKernels.make_tail`, for a rank with these ids."""
