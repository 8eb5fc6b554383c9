"""Bugs that hide from listed shapes and from single calls, planted in a backend in plain torch.

Each is caught by the named check of the attention suite at its default level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionConfig,
    DecodeMetadata,
    PrefillMetadata,
)
from nanovllm_kit import attention_memory

from .plain_attention import Plain, plain_with, run_check

HEADS = "test_query_heads_read_their_own_kv_head"
ROWS = "test_a_batch_may_have_many_rows"
CONTEXTS = "test_early_keys_of_a_long_context_count"
CHUNKS = "test_chunks_may_bring_many_queries"
MIXED = "test_batches_of_any_shape_equal_the_reference"
FAR = "test_blocks_beyond_2_to_the_32_elements_are_read"
CONTENTS = "test_equal_lengths_may_come_with_other_contents"
GROWING = "test_rows_grow_token_by_token"
LAST_PLAN = "test_a_plan_is_the_last_one"
SHRINKING = "test_batches_shrink_and_grow"
BESIDE = "test_backends_share_nothing"
LET_GO = "test_past_steps_are_let_go"
GROWTH = "test_memory_does_not_grow_with_the_steps"
SHARED = "test_sequences_may_share_blocks"
FREED = "test_blocks_before_the_window_may_belong_to_others"
SCRATCH = "test_backends_write_to_no_memory_of_each_other"


# ------------------------------------------------------------------ wrong from some size on


@dataclass
class Call:
    """One run, once it is over: what came in, and the output to spoil."""

    config: AttentionConfig
    phase: str
    q: Tensor
    lens: list[int]
    starts: list[int]
    out: Tensor

    @property
    def group(self) -> int:
        return self.config.num_heads // self.config.num_kv_heads

    def chunks(self) -> list[Tensor]:
        """The output of each sequence."""
        return [self.out[a:b] for a, b in zip(self.starts, self.starts[1:], strict=False)]


class Spoilt(Plain):
    """Right, then spoilt."""

    spoil: ClassVar[Callable[[Call], object]]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Any, *rest: Any) -> None:
        super()._attend(q, k, v, table, *rest)
        lens, starts, out = rest
        phase = "decode" if starts == [*range(len(lens) + 1)] else "prefill"
        type(self).spoil(Call(self.config, phase, q, lens, starts, out))


def last_head_of_group(call: Call, size: int) -> None:
    if call.group == size:
        call.out[:, size - 1 :: size] = 0


def own_key_lost(call: Call, index: int) -> None:
    """A query that does not see itself answers as the one before it would, nearly."""
    for chunk in call.chunks():
        if len(chunk) > index:
            chunk[index] = chunk[index - 1]


def rows_from(call: Call, first: int) -> None:
    if len(call.lens) > first:
        call.out[call.starts[first] :] = 0


def kv_heads_mixed_up(call: Call) -> None:
    """Each query head answers from another KV head."""
    call.out.copy_(call.out.unflatten(1, (-1, call.group)).flip(1).flatten(1, 2))


SPOILT: list[tuple[str, Callable[[Call], object], str]] = [
    ("KV heads from the 5th on", lambda c: c.out[:, 4 * c.group :].zero_(), HEADS),
    (
        "the last of 5 KV heads",
        lambda c: c.out[:, -c.group :].zero_() if c.config.num_kv_heads == 5 else None,
        HEADS,
    ),
    (
        "the last of 11 KV heads, in prefill",
        lambda c: (
            c.out[:, -c.group :].zero_()
            if c.config.num_kv_heads == 11 and c.phase == "prefill"
            else None
        ),
        HEADS,
    ),
    ("query heads from the 25th on", lambda c: c.out[:, 24:].zero_(), HEADS),
    ("query heads from the 65th on", lambda c: c.out[:, 64:].zero_(), HEADS),
    *(
        (
            f"the last query head of groups of {size}",
            lambda c, size=size: last_head_of_group(c, size),  # type: ignore[misc]
            HEADS,
        )
        for size in (3, 5, 6, 7, 10, 12, 14, 15)
    ),
    *(
        (f"rows from number {first} on", lambda c, first=first: rows_from(c, first), ROWS)  # type: ignore[misc]
        for first in (100, 255, 512)
    ),
    (
        "the last row of an odd batch",
        lambda c: c.chunks()[-1].zero_() if len(c.lens) % 2 and len(c.lens) > 70 else None,
        ROWS,
    ),
    (
        "the KV heads of more than 24 rows mixed up",
        lambda c: kv_heads_mixed_up(c) if len(c.lens) > 24 else None,
        ROWS,
    ),
    (
        "the KV heads of chunks of more than 200 queries mixed up",
        lambda c: kv_heads_mixed_up(c) if max(map(len, c.chunks())) > 200 else None,
        CHUNKS,
    ),
    (
        "windows of more than 24 rows",
        lambda c: c.out.mul_(1.1) if len(c.lens) > 24 and c.config.sliding_window else None,
        ROWS,
    ),
    ("query 256 does not see itself", lambda c: own_key_lost(c, 256), CHUNKS),
    ("query 1,500 does not see itself", lambda c: own_key_lost(c, 1500), CHUNKS),
    (
        "queries from the 1,025th on",
        lambda c: [chunk[1024:].zero_() for chunk in c.chunks()],
        CHUNKS,
    ),
    (
        "one head where 3 KV heads and more meet large blocks",
        lambda c: (
            c.out[:, 1].zero_() if c.config.num_kv_heads > 2 and c.config.block_size >= 64 else None
        ),
        MIXED,
    ),
    (
        "windows with a soft cap, in rows",
        lambda c: (
            c.out.mul_(1.1)
            if c.config.sliding_window and c.config.soft_cap and c.phase == "decode"
            else None
        ),
        MIXED,
    ),
]


@pytest.mark.parametrize(("name", "spoil", "check"), SPOILT, ids=[name for name, *_ in SPOILT])
def test_what_is_wrong_from_some_size_on_is_caught(
    name: str, spoil: Callable[[Call], object], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size, up to what the check's docstring promises."""
    monkeypatch.setattr(Spoilt, "spoil", staticmethod(spoil), raising=False)
    with pytest.raises(AssertionError, match=r"norm|finite|far off"):
        run_check(check, plain_with(Spoilt))


# ------------------------------------------------------------------ wrong in its own way


class CutAt(Plain):
    """Contexts are cut: only the last keys count."""

    most: ClassVar[int] = 3072

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        window = min(self.most, config.sliding_window or self.most)
        super().__init__(options, replace(config, sliding_window=window))


class CutAt4096(CutAt):
    most = 4096


class CutAt10000(CutAt):
    most = 10_000


class SplitsCombinedWrongly(Plain):
    """Splits of 2,048 keys; the third and later ones are added with the second's weight."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Any, *rest: Any) -> None:
        super()._attend(q, k, v, table, *rest)
        lens, starts, out = rest
        for row, keys in enumerate(lens):
            if keys > 2 * 2048:
                early = torch.zeros_like(out[starts[row] : starts[row + 1]])
                one = q[starts[row] : starts[row + 1]]
                blocks = table[row : row + 1]
                super()._attend(one, k, v, blocks, [2 * 2048], [0, len(one)], early)
                out[starts[row] : starts[row + 1]] += 0.01 * early


class Unsigned32(Plain):
    """Offsets that wrap at 2**32 elements."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any) -> None:
        wrap = 2**32 // k[0].numel()
        super()._attend(q, k, v, table % wrap, *rest)


class OffByOneHeadStride(Plain):
    """A block's last token is read from the block's first slot, where a block is full."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        k, v = k.clone(), v.clone()
        v[:, -1] = v[:, 0]
        super()._attend(q, k, v, *rest)


# ------------------------------------------------------------------ state kept between calls


class PlanByAddress(Plain):
    """The plan, with its block ids, is kept while table address and lengths are the same."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        self.plans: tuple[Any, Any] | None = None

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        key = (metadata.block_table.data_ptr(), metadata.seq_lens.tolist())
        if self.plans is None or self.plans[0] != key:
            self.plans = (key, metadata.block_table.clone())

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        assert self.plans is not None
        super().run_decode(q, k, v, replace(metadata, block_table=self.plans[1]), out)


class PlanByObject(PlanByAddress):
    """The plan is kept for one metadata object."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        Plain.plan_decode(self, metadata)
        if self.plans is None or self.plans[0] is not metadata:
            self.plans = (metadata, metadata.block_table.clone())


class PlanByBlockCount(PlanByAddress):
    """The table is copied again only where a row has gained a block; lengths are as planned."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        Plain.plan_decode(self, metadata)
        blocks = -(-metadata.seq_lens // self.config.block_size)
        key = (metadata.block_table.data_ptr(), blocks.tolist())
        if self.plans is None or self.plans[0] != key:
            self.plans = (key, metadata.seq_lens.clone())

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        assert self.plans is not None
        Plain.run_decode(self, q, k, v, replace(metadata, seq_lens=self.plans[1]), out)


class PrefillPlanByLengths(Plain):
    """The prefill plan is kept while lengths are equal: the same lengths with other blocks."""

    key: Any = None

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        key = (metadata.seq_lens.tolist(), metadata.query_start_loc.tolist())
        if key != self.key:
            self.key, self.table = key, metadata.block_table.clone()

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        super().run_prefill(q, k, v, replace(metadata, block_table=self.table), out)


class PrefillPlanByBounds(Plain):
    """Where chunks begin is kept while the longest of each is as long."""

    key: Any = None

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        key = (metadata.max_query_len, metadata.max_seq_len, metadata.seq_lens.shape)
        if key != self.key:
            self.key, self.starts = key, metadata.query_start_loc.clone()

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        super().run_prefill(q, k, v, replace(metadata, query_start_loc=self.starts), out)


class KeysKept(Plain):
    """Gathered keys are kept by blocks, as if a block's contents never changed."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        self.kept: dict[Any, Tensor] = {}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any) -> None:
        key = (k.data_ptr(), tuple(table.flatten().tolist()))
        if len(self.kept) > 8:
            self.kept.clear()
        super()._attend(q, self.kept.setdefault(key, k.clone()), v, table, *rest)


class FirstPlanRuns(Plain):
    """A plan that no run has used up is kept."""

    planned: DecodeMetadata | None = None

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        self.planned = self.planned or metadata

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        planned, self.planned = self.planned or metadata, None
        if planned.seq_lens.shape == metadata.seq_lens.shape:
            metadata = planned
        super().run_decode(q, k, v, metadata, out)


class OnePlanForBothPhases(Plain):
    """The last plan of either phase gives the lengths."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        self.lens = metadata.seq_lens.clone()

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        self.lens = metadata.seq_lens.clone()

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        lens = self.lens[: len(metadata.seq_lens)]
        if len(lens) == len(metadata.seq_lens):
            bound = metadata.block_table.shape[1] * self.config.block_size
            metadata = replace(metadata, seq_lens=lens.clamp(max=bound))
        super().run_decode(q, k, v, metadata, out)


class LongestSoFar(Plain):
    """Lengths are written into a buffer that is not cleared behind a shorter batch."""

    def allocate(self) -> None:
        self.lens = torch.zeros(self.config.max_num_seqs, dtype=torch.int32)

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        rows = metadata.num_rows
        torch.maximum(self.lens[:rows], metadata.seq_lens, out=self.lens[:rows])

    def run_decode(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        lens = self.lens[: metadata.num_rows]
        super().run_decode(q, k, v, replace(metadata, seq_lens=lens), out)


class ClassTable(Plain):
    """Planned block ids lie in scratch memory of the class."""

    table: ClassVar[Tensor] = torch.zeros(64, 64, dtype=torch.int32)

    def plan_prefill(self, metadata: PrefillMetadata) -> None:
        rows, width = metadata.block_table.shape
        self.table[:rows, :width] = metadata.block_table

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        rows, width = metadata.block_table.shape
        table = self.table[:rows, :width]
        super().run_prefill(q, k, v, replace(metadata, block_table=table), out)


class ClassScratch(Plain):
    """Outputs pass through scratch memory of the class, within each run."""

    scratch: ClassVar[dict[Any, Tensor]] = {}

    def _attend(self, q: Tensor, *args: Any) -> None:
        *rest, out = args
        space = self.scratch.setdefault(q.dtype, torch.zeros(2**20, dtype=q.dtype))
        between = space[: out.numel()].view(out.shape)
        super()._attend(q, *rest, between)
        out.copy_(between)


class ScaleOfTheFirst(Plain):
    """The first instance's scale serves all."""

    first: ClassVar[float | None] = None

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        type(self).first = type(self).first or config.scale
        super().__init__(options, replace(config, scale=type(self).first or 1.0))


class KeepsMetadata(Plain):
    """Each step's metadata is kept for ever."""

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        super().__init__(options, config)
        self.steps: list[Any] = []

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        self.steps.append(metadata)


class KeepsOutputs(KeepsMetadata):
    """Each chunk's output is kept for ever, as a copy."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        Plain.plan_decode(self, metadata)

    def run_prefill(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any, out: Tensor) -> None:
        super().run_prefill(q, k, v, metadata, out)
        self.steps.append(out.clone())


class KeepsNumbers(Plain):
    """Plans by lengths, as lists, for ever: in its module."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        lens = metadata.seq_lens.tolist()
        PLANS[len(PLANS), tuple(lens)] = lens


PLANS: dict[Any, Any] = {}


class GrowingScratch(Plain):
    """One tensor that is longer after each step."""

    scratch = torch.zeros(0)

    def plan_decode(self, metadata: DecodeMetadata) -> None:
        super().plan_decode(metadata)
        self.scratch = torch.cat((self.scratch, metadata.seq_lens))


class EachBlockHasOneRow(Plain):
    """A block that two rows name is read for the later one alone."""

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lens: list[int],
        starts: list[int],
        out: Tensor,
    ) -> None:
        table = table.clone()
        used = [-(-keys // self.config.block_size) for keys in lens]
        owner = {
            int(block): row
            for row, count in enumerate(used)
            for block in table[row, :count].tolist()
        }
        for row, count in enumerate(used):
            own = [block for block in table[row, :count].tolist() if owner[block] == row]
            for place in range(count if own else 0):
                if owner[int(table[row, place])] != row:
                    table[row, place] = own[-1]
        super()._attend(q, k_cache, v_cache, table, lens, starts, out)


class ReadsFreedBlocks(Plain):
    """Keys before the window have no weight, but they are multiplied."""

    def _freed_blocks(self, keys: int, queries: int) -> int:
        return 0


class FreesByTheLastQuery(Plain):
    """Blocks count as freed by the window of a chunk's last query, not of its first."""

    def _freed_blocks(self, keys: int, queries: int) -> int:
        return super()._freed_blocks(keys, 1)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (ReadsFreedBlocks, FREED),
        (FreesByTheLastQuery, FREED),
        (EachBlockHasOneRow, SHARED),
        (CutAt, CONTEXTS),
        (CutAt4096, CONTEXTS),
        (CutAt10000, CONTEXTS),
        (SplitsCombinedWrongly, CONTEXTS),
        (Unsigned32, FAR),
        (OffByOneHeadStride, MIXED),
        (PlanByAddress, CONTENTS),
        (PlanByObject, CONTENTS),
        (PlanByBlockCount, GROWING),
        (PrefillPlanByLengths, CONTENTS),
        (PrefillPlanByBounds, CONTENTS),
        (KeysKept, CONTENTS),
        (FirstPlanRuns, LAST_PLAN),
        (OnePlanForBothPhases, LAST_PLAN),
        (LongestSoFar, SHRINKING),
        (ClassTable, BESIDE),
        (ScaleOfTheFirst, BESIDE),
        (ClassScratch, SCRATCH),
        (KeepsMetadata, LET_GO),
        (KeepsOutputs, GROWTH),
        (KeepsNumbers, GROWTH),
        (GrowingScratch, GROWTH),
    ],
)
def test_what_is_wrong_in_its_own_way_is_caught(
    wrong: type[Plain], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check that is about it."""
    monkeypatch.setattr(attention_memory, "STEPS", 8)
    with pytest.raises(AssertionError):
        run_check(check, plain_with(wrong))
