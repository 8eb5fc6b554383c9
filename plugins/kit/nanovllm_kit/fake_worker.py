"""A worker without a model, whose next token betrays every mistake with blocks, rows and lengths.

Computing a position writes a KV cell, in each cache group, that depends on all ids up to there. The
rows of a step write first, then they read; blocks keep what was written last. A position reads all
cells in its window of each group through the block tables; one that holds anything but that row's
own cell is an error, and the next token is a hash of them all. So a block that is freed, reused,
shared or published too early is noticed, and so is one that is dropped while a window reaches it.
`reference_tokens` says what the text must be, from the ids alone.

Plans are applied when submitted, in order; results wait until they are collected, which with an
engine that works n steps ahead is n steps later. Plans and results go through pickle, as between
processes.
"""

from __future__ import annotations

import pickle
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from nanovllm_core.interfaces.constraint import allows
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.plan import (
    PADDED,
    Admission,
    RowSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
    WorkerInfo,
    mask_words,
)
from nanovllm_core.interfaces.specs import NoOptions

_MASK = (1 << 64) - 1


Sent = TypeVar("Sent", StepPlan, StepResult, TokenMasks)


def next_cell(previous: int, token_id: int) -> int:
    """The KV of one position: depends on its id and on everything before it."""
    return (previous * 6364136223846793005 + token_id * 1442695040888963407 + 1) & _MASK


def group_cells(cells: NDArray[np.uint64], group: int) -> NDArray[np.uint64]:
    """The same positions in another cache group: no two groups hold equal cells."""
    return cells ^ np.uint64(group * 0x9E3779B97F4A7C15 & _MASK)


def first_seen(window: int | None, position: int) -> int:
    """The first position that a window of so many tokens, the newest included, reaches."""
    return 0 if window is None else max(0, position - window + 1)


def next_token(
    cells: NDArray[np.uint64],
    sampling: RowSampling,
    output_index: int,
    vocab_size: int,
    allowed: Sequence[int] | None = None,
) -> int:
    """The sampled token: depends on all the KV, on the seed, and on the number of the output.

    `allowed` are the ids to choose from, in order; None for all.
    """
    noise = (sampling.seed, output_index) if sampling.temperature > 0 else (0, 0)
    digest = xxhash.xxh64_intdigest(cells.tobytes(), seed=noise[0] & _MASK)
    number = digest + noise[1]
    return number % vocab_size if allowed is None else allowed[number % len(allowed)]


def reference_tokens(
    prompt: Sequence[int],
    sampling: RowSampling,
    max_length: int,
    vocab_size: int,
    windows: Sequence[int | None] = (None,),
    allowed: Callable[[Sequence[int]], Sequence[int]] | None = None,
) -> list[int]:
    """The output of a request that runs alone on an endless cache.

    `allowed` gives the ids that may follow an output, in order; None for all.
    """
    ids, cells, cell = list(prompt), [], 0
    for token_id in prompt[:-1]:
        cell = next_cell(cell, token_id)
        cells.append(cell)
    while len(ids) < max_length:
        cell = next_cell(cell, ids[-1])
        cells.append(cell)
        computed = np.array(cells, np.uint64)
        seen = [
            group_cells(computed[first_seen(window, len(ids) - 1) :], group)
            for group, window in enumerate(windows)
        ]
        index = len(ids) - len(prompt)
        choice = None if allowed is None else allowed(ids[len(prompt) :])
        ids.append(next_token(np.concatenate(seen), sampling, index, vocab_size, choice))
        if ids[-1] in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
            break
    return ids[len(prompt) :]


@dataclass
class FakeRow:
    """What the device knows of a row. `cells` are those that its ids ask for."""

    ids: list[int]
    cells: array[int]
    block_tables: list[list[int]]
    computed: int
    num_prompt_tokens: int
    max_length: int
    sampling: RowSampling
    finished: bool = False


class FakeExecutor(Executor):
    """Runs plans on the fake worker and refuses any plan that breaks the contract.

    `pickled`: plans and results are copies, as another process would receive them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        cache_windows: tuple[int | None, ...] = (None,),
        pickled: bool = True,
    ) -> None:
        super().__init__(NoOptions())
        self._sent: Callable[[Any], Any] = _sent if pickled else lambda original: original
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_blocks = -(-max_model_len // block_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.windows = cache_windows
        self.cells = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.rows: dict[int, FakeRow] = {}
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.sampled_rows: list[tuple[int, ...]] = []
        """The rows that got a token, by plan: first those that decode."""
        self.waiting: tuple[int, ...] = ()
        """The rows of the newest step that wait for their sampling; empty where it has run."""
        self.seen: dict[int, NDArray[np.uint64]] = {}
        """By row, the cells that the newest step's last position sees."""
        self.events: list[str] = []
        """The calls, in order, as "submit", "sample" and "collect"."""
        self.epoch = 0
        self.decode_rows: tuple[int, ...] = ()
        """Those of the epoch."""
        self.most_in_flight = 0
        self.blocks_touched: set[int] = set()

    def start(self, setup: WorkerSetup) -> WorkerInfo:
        raise NotImplementedError("Harness builds the engine by hand")

    def close(self) -> None: ...

    def collect(self) -> StepResult:
        self.events.append("collect")
        result: StepResult = self._sent(self.results.popleft())
        return result

    def submit(self, plan: StepPlan) -> None:
        plan = self._sent(plan)
        assert not self.waiting, "a plan came before the masks of the step before"
        self.events.append("submit")
        self.plans.append(plan)
        self._take_rows(plan)
        decode_rows = self.decode_rows
        assert decode_rows or plan.prefill, "an empty step was submitted"
        assert plan.num_tokens <= self.max_num_batched_tokens, "over the token budget"
        busy = [*decode_rows, *(chunk.row for chunk in plan.prefill)]
        assert len(set(busy)) == len(busy), "a row works twice in one step"
        assert all(0 <= row < self.num_rows for row in busy)
        appends = [] if plan.appends is None else plan.appends.tolist()
        deltas = {a.row for a in plan.admissions} | {row for row, *_ in appends}
        assert deltas <= set(busy), "a delta for a row that does not work"
        for admission in plan.admissions:
            self._admit(admission)
        for row_index, group, index, block_id in appends:
            table = self.rows[row_index].block_tables[group]
            assert index == len(table), "a block was appended out of order"
            table.append(block_id)
            assert len(table) <= self.max_blocks, "a block table outgrew the device's"
            self.blocks_touched.add(block_id)
        work = {row: 1 for row in decode_rows if not self.rows[row].finished}
        for row_index in work:
            row = self.rows[row_index]
            assert row.computed == len(row.ids) - 1, "a row decodes that is not ready to"
        for chunk in plan.prefill:
            row = self.rows[chunk.row]
            assert chunk.start == row.computed, "a chunk does not start where the row stands"
            assert chunk.start + chunk.length <= len(row.ids)
            assert chunk.samples == (chunk.start + chunk.length == len(row.ids))
            work[chunk.row] = chunk.length
        for row_index, length in work.items():
            self._write(self.rows[row_index], length)
        self.seen = {index: self._read(index, length) for index, length in work.items()}
        sampled = decode_rows + tuple(chunk.row for chunk in plan.prefill if chunk.samples)
        assert plan.num_sampled == len(sampled)
        self.sampled_rows.append(sampled)
        constrained = any(self.rows[each].sampling.constrained for each in sampled)
        assert plan.samples_later == constrained, "samples_later is not that of the rows"
        if plan.samples_later:
            self.waiting = sampled
        else:
            self._choose(sampled, {})

    def sample(self, masks: TokenMasks) -> None:
        masks = self._sent(masks)
        self.events.append("sample")
        assert self.waiting, "masks came, and no step waits for any"
        assert masks.allowed.shape == (len(masks.rows), mask_words(self.vocab_size))
        allowed = {
            row: [token_id for token_id in range(self.vocab_size) if allows(mask, token_id)]
            for row, mask in zip(masks.rows.tolist(), masks.allowed, strict=True)
        }
        assert len(allowed) == len(masks.rows), "a row has two masks"
        assert all(self.rows[row].sampling.constrained for row in allowed)
        assert allowed.keys() <= {*self.waiting}, "a mask for a row that gets no token"
        sampled, self.waiting = self.waiting, ()
        self._choose(sampled, allowed)

    def _take_rows(self, plan: StepPlan) -> None:
        """The decoding rows are those that the plan lists, else those of the plan before."""
        if plan.decode_rows is None:
            assert plan.epoch == self.epoch, "a plan leaves out rows that no plan listed"
        else:
            assert plan.epoch == self.epoch + 1, "an epoch does not follow the one before"
            assert plan.decode_rows.dtype == np.int32
            self.epoch, self.decode_rows = plan.epoch, tuple(plan.decode_rows.tolist())
        assert plan.num_decode == len(self.decode_rows)

    def _admit(self, admission: Admission) -> None:
        num_groups, num_blocks = admission.block_ids.shape
        assert admission.block_ids.dtype == np.int32
        assert num_groups == len(self.windows), "not one block table for each cache group"
        assert num_blocks <= self.max_blocks, "a block table outgrew the device's"
        assert 0 <= admission.num_computed < len(admission.token_ids), "nothing left to compute"
        assert admission.num_computed % self.block_size == 0
        self.rows[admission.row] = FakeRow(
            ids=admission.token_ids.tolist(),
            cells=array("Q"),
            block_tables=admission.block_ids.tolist(),
            computed=admission.num_computed,
            num_prompt_tokens=admission.num_prompt_tokens,
            max_length=admission.max_length,
            sampling=admission.sampling,
        )
        self.blocks_touched.update(admission.block_ids[admission.block_ids >= 0].tolist())

    def _slots(self, row: FakeRow, group: int, start: int, end: int) -> NDArray[np.intp]:
        """The places of the positions from `start` to `end` - 1."""
        positions = np.arange(start, end)
        blocks = np.array(row.block_tables[group], dtype=np.intp)[positions // self.block_size]
        assert (blocks >= 0).all(), "a position has no block"
        slots: NDArray[np.intp] = blocks * self.block_size + positions % self.block_size
        return slots

    def _write(self, row: FakeRow, length: int) -> None:
        """Compute the next positions: their cells are in the blocks of every group."""
        start, row.computed = row.computed, row.computed + length
        for token_id in row.ids[len(row.cells) : row.computed]:
            row.cells.append(next_cell(row.cells[-1] if row.cells else 0, token_id))
        new = np.array(row.cells[start:], np.uint64)
        for group in range(len(self.windows)):
            self.cells[self._slots(row, group, start, row.computed)] = group_cells(new, group)

    def _read(self, row_index: int, length: int) -> NDArray[np.uint64]:
        """Everything that the last `length` positions see; returns what the last one does."""
        row, seen = self.rows[row_index], []
        own = np.array(row.cells, np.uint64)
        for group, window in enumerate(self.windows):
            first = first_seen(window, row.computed - length)
            cells = self.cells[self._slots(row, group, first, row.computed)]
            wrong = np.flatnonzero(cells != group_cells(own[first:], group))
            assert not len(wrong), (
                f"at {row.computed - 1} row {row_index} reads what is not its own at positions "
                f"{(first + wrong).tolist()} of group {group}, whose window is {window}"
            )
            seen.append(cells[first_seen(window, row.computed - 1) - first :])
        return np.concatenate(seen)

    def _sample(self, row_index: int, allowed: Sequence[int] | None) -> tuple[int, bool]:
        row = self.rows[row_index]
        if row.finished:
            return PADDED, False
        cells = self.seen[row_index]
        index = row.computed - row.num_prompt_tokens
        token_id = next_token(cells, row.sampling, index, self.vocab_size, allowed)
        row.ids.append(token_id)
        assert len(row.ids) <= row.max_length, "a row ran past its length"
        stops = token_id in row.sampling.stop_token_ids and index + 1 >= row.sampling.min_tokens
        row.finished = stops or len(row.ids) == row.max_length
        return token_id, row.finished

    def _choose(self, rows: Sequence[int], allowed: Mapping[int, Sequence[int]]) -> None:
        """A token for each row; a constrained one without a mask has ended on the host."""
        self._reply(rows, [self._sample(row, allowed.get(row)) for row in rows])

    def _reply(self, rows: Sequence[int], outcome: list[tuple[int, bool]]) -> None:
        logprobs = {
            entry: TokenLogprobs(-float(outcome[entry][0]), ((outcome[entry][0], -1.0),))
            for entry, row in enumerate(rows)
            if self.rows[row].sampling.logprobs is not None and outcome[entry][0] != PADDED
        }
        self.results.append(
            StepResult(
                np.array([token_id for token_id, _ in outcome], dtype=np.int32),
                np.array([finished for _, finished in outcome], dtype=np.bool_),
                logprobs,
            )
        )
        self.most_in_flight = max(self.most_in_flight, len(self.results))


def _sent(original: Sent) -> Sent:
    """What another process would receive."""
    received: Sent = pickle.loads(pickle.dumps(original))
    assert received == original
    return received
