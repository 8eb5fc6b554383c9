"""The memory of steps whose prompts are attended by items, and the launches of plan and merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_triton.prefill_tuning import (
    MERGE_TILES,
    SPLIT_TILES,
    START_TILES,
    PackedTuning,
    PrefillTuning,
)
from nanovllm_attention_triton.sizes import next_power_of_2
from nanovllm_attention_triton.split_kernels import merge_splits_kernel
from nanovllm_attention_triton.split_plan import ITEM_FIELDS, MOST_WAVES, plan_splits_kernel
from nanovllm_core.api import InconsistentStateError, PrefillMetadata
from nanovllm_core.kernels import launch_options, supports_dependent_launch

MERGE_ROWS = 4
"""Rows that a program merges at a time."""
MERGE_PROGRAMS = 8
"""On each multiprocessor at least, where the rows are enough."""
WHOLE_TILES = 7
"""Of keys: so many are never split, by the estimates of `count_splits`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitShape:
    """The blocks of rows and the programs of a prefill kernel.

    `group` query heads share a KV head; a row is one of their queries. Programs have `block_m` rows
    and tiles of `block_n` keys, and `resident` of them, one or two, run side by side on a
    multiprocessor. `block_d`: columns of their results. `window`: keys that a query sees, its own
    included; None: all.
    """

    num_kv_heads: int
    group: int
    block_m: int
    block_n: int
    block_d: int
    num_multiprocessors: int
    resident: int
    max_num_seqs: int
    window: int | None = None

    def matches(self, tuning: PrefillTuning | PackedTuning) -> bool:
        """Whether a kernel with these constants has such programs."""
        return (self.block_m, self.block_n) == (tuning.block_m, tuning.block_n)

    @property
    def most_blocks(self) -> int:
        """The row blocks of a step by items, one more for each sequence not counted."""
        return max(3 * self._items_of_waves(1) // 2, 1)

    @property
    def most_parts(self) -> int:
        """Items of row blocks that are split, at most; each has a program for each KV head."""
        return self._items_of_waves(MOST_WAVES.value)

    def most_items(self, row_blocks: int) -> int:
        """The items that a step of at most so many row blocks can have; see `count_splits`."""
        few = row_blocks * self.num_kv_heads <= self.num_multiprocessors
        return max(row_blocks, self._items_of_waves(1 if few else MOST_WAVES.value))

    def _items_of_waves(self, waves: int) -> int:
        return waves * self.resident * self.num_multiprocessors // self.num_kv_heads

    def merged_rows(self, row_blocks: int) -> int:
        """The rows that a program merges, a power of two, of so many row blocks."""
        programs = self.num_multiprocessors * MERGE_PROGRAMS
        pieces = max(programs // (row_blocks * self.num_kv_heads), 1)
        return max(self.block_m // next_power_of_2(pieces), MERGE_ROWS)

    def may_split(self, max_seq_len: int) -> bool:
        """Whether a context of a step whose sequences have at most so many keys may be split."""
        longest = max_seq_len
        if self.window is not None:
            longest = min(longest, self.window + self.block_m)
        return longest > WHOLE_TILES * self.block_n


class SplitWork:
    """The device memory of the items of a step, and of their partial results.

    All sizes follow from the shape; nothing is allocated after construction, so a captured graph
    may keep the addresses. Not for use on two streams at once.
    """

    def __init__(self, shape: SplitShape, device: torch.device) -> None:
        self.shape = shape
        self.merge_options = launch_options(supports_dependent_launch(device))
        # A multiple of 16: Triton compiles another variant for integers that are not.
        capacity = shape.most_items(shape.most_blocks + shape.max_num_seqs)
        self.capacity = -(-capacity // 16) * 16
        parts = shape.most_parts * shape.num_kv_heads

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.items = zeros(ITEM_FIELDS.value, self.capacity)
        self.first_items, self.counts = zeros(self.capacity), zeros(2)
        self.partial = zeros(parts, shape.block_m, shape.block_d, dtype=torch.float32)
        self.lse = zeros(parts, shape.block_m, dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured kernel reads or writes, by name."""
        return {
            "split_items": self.items,
            "split_first_items": self.first_items,
            "split_counts": self.counts,
            "split_partial": self.partial,
            "split_lse": self.lse,
        }

    def serves(self, metadata: PrefillMetadata, num_queries: int) -> bool:
        """Whether a step of so many queries in all, padding included, is attended by items.

        The rows must be few, and a context long enough that it may be split.
        """
        num_queries = min(num_queries, len(metadata.seq_lens) * metadata.max_query_len)
        row_blocks = num_queries * self.shape.group // self.shape.block_m
        return row_blocks <= self.shape.most_blocks and self.shape.may_split(metadata.max_seq_len)

    def plan(self, metadata: PrefillMetadata) -> None:
        """List the items of the step's next runs.

        Raises InconsistentStateError for more sequences than the shape has.
        """
        shape, num_seqs = self.shape, len(metadata.seq_lens)
        if num_seqs > shape.max_num_seqs:
            raise InconsistentStateError(
                f"a step of {num_seqs} prompts; the workspace holds max_num_seqs="
                f"{shape.max_num_seqs}"
            )
        if num_seqs == 0 or not shape.may_split(metadata.max_seq_len):
            return
        plan_splits_kernel[(num_seqs,)](
            metadata.seq_lens,
            metadata.query_start_loc,
            self.items,
            self.first_items,
            self.counts,
            num_seqs,
            shape.num_multiprocessors,
            shape.num_kv_heads,
            self.capacity,
            GROUP=shape.group,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            WINDOW=shape.window or 0,
            BLOCK_SEQS=next_power_of_2(shape.max_num_seqs),
            RESIDENT=shape.resident,
            START_TILES=START_TILES,
            SPLIT_TILES=SPLIT_TILES,
            MERGE_TILES=MERGE_TILES,
        )

    def merge(self, row_blocks: int, out_THD: Tensor) -> None:
        """Merge the splits of the step's row blocks, so many at most, into `out_THD`."""
        shape = self.shape
        rows = shape.merged_rows(row_blocks)
        merge_splits_kernel[(shape.num_kv_heads, shape.block_m // rows, row_blocks)](
            self.partial,
            self.lse,
            out_THD,
            self.items,
            self.first_items,
            self.counts,
            out_THD.stride(0),
            out_THD.stride(1),
            self.capacity,
            rows,
            GROUP=shape.group,
            BLOCK_M=shape.block_m,
            HEAD_SIZE=out_THD.shape[-1],
            BLOCK_D=shape.block_d,
            ROWS=MERGE_ROWS,
            **self.merge_options,
        )


def item_arguments(splits: SplitWork | None) -> dict[str, Any]:
    """The arguments of a prefill kernel that say what it attends: items, or row blocks."""
    pointers = ("items_ptr", "counts_ptr", "partial_ptr", "partial_lse_ptr")
    if splits is None:
        return {**dict.fromkeys(pointers), "item_capacity": 0, "DEPENDENT": False}
    tensors = (splits.items, splits.counts, splits.partial, splits.lse)
    return {
        **dict(zip(pointers, tensors, strict=True)),
        "item_capacity": splits.capacity,
        "DEPENDENT": splits.merge_options["DEPENDENT"],
    }
