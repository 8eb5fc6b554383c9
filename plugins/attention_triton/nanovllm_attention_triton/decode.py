"""Launches the decode kernels and owns the memory they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import triton
from torch import Tensor

from nanovllm_attention_triton.decode_kernels import decode_kernel
from nanovllm_attention_triton.decode_plan import ITEM_FIELDS, plan_kernel
from nanovllm_attention_triton.decode_qkv_kernels import decode_qkv_kernel
from nanovllm_attention_triton.decode_tuning import (
    DECODE_REGISTERS,
    MERGE_ELEMENTS,
    MERGE_ROUND,
    MOST_HEADS,
    QKV_MERGE_ELEMENTS,
    QKV_MERGE_ROUND,
    QKV_REGISTERS,
    DecodeTuning,
    prepares,
    program_memory,
)
from nanovllm_attention_triton.sizes import next_power_of_2, padded_head_size
from nanovllm_core.api import QKPrep
from nanovllm_core.kernels import launch_options, supports_dependent_launch

LOG2_E = math.log2(math.e)
MIN_BLOCK_HEADS = 16
"""The rows of a tile of query heads that tensor cores multiply; those that are not heads are idle.
"""
PLAN_ROWS = 128
"""Rows of a plan at least, one for each of its threads."""
REGISTER_FILE = 65536
"""The 32-bit registers of a multiprocessor."""


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs a device really runs side by side; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory of one multiprocessor; an H100's for Triton's interpreter."""
    if device.type != "cuda":
        return 228 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What decode attention needs to know to size its memory and its grids.

    A program takes `partial_heads` query heads of one KV head, a power of two and at most
    `most_heads`, in a tile of `block_heads`; `head_blocks` programs make a group. `block_d` is the
    head size as `padded_head_size` rounds it. `window`: keys that a query sees, its own included;
    None: all. `shared_memory`: bytes of one multiprocessor.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    max_num_seqs: int
    max_seq_len: int
    num_multiprocessors: int
    window: int | None = None
    soft_cap: float | None = None
    shared_memory: int = 228 * 1024
    most_heads: int = MOST_HEADS

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def partial_heads(self) -> int:
        return min(next_power_of_2(self.group), self.most_heads)

    @property
    def block_heads(self) -> int:
        return max(self.partial_heads, MIN_BLOCK_HEADS)

    @property
    def head_blocks(self) -> int:
        return -(-self.group // self.partial_heads)

    @property
    def programs_per_item(self) -> int:
        return self.num_kv_heads * self.head_blocks

    @property
    def block_d(self) -> int:
        return padded_head_size(self.head_size)

    def constants(self, block_size: int, tile: int) -> dict[str, int | float]:
        """The compile-time arguments of `decode_kernel`."""
        return {
            "GROUP": self.group,
            "BLOCK_H": self.block_heads,
            "HEAD_BLOCKS": self.head_blocks,
            "PARTIAL_HEADS": self.partial_heads,
            "MERGE": self.chunks_of(MERGE_ELEMENTS),
            "HEAD_SIZE": self.head_size,
            "BLOCK_D": self.block_d,
            "BLOCK_SIZE": block_size,
            "TILE": tile,
            "WINDOWED": self.window is not None,
            "SOFT_CAP": self.soft_cap or 0.0,
        }

    def qkv_constants(self, block_size: int, tile: int, prep: QKPrep) -> dict[str, int | float]:
        """The compile-time arguments of `decode_qkv_kernel`."""
        return self.constants(block_size, tile) | {
            "EPS": prep.eps,
            "HALF": prep.cos_sin_cache.shape[1] // 2,
            "MERGE": self.chunks_of(QKV_MERGE_ELEMENTS),
        }

    def chunks_of(self, elements: int) -> int:
        """The chunks whose partial results have so many elements, one at least."""
        return max(elements // (self.partial_heads * self.block_d), 1)

    def registers(self, tuning: DecodeTuning) -> int | None:
        """The most registers of a thread: what masks take, or the tuning's bound where there are
        none, as for the plain kernel of head sizes 64 and 128.
        """
        plain = self.window is None and not self.soft_cap and self.head_size in (64, 128)
        return tuning.registers if plain else max(tuning.registers or 0, DECODE_REGISTERS)

    def prepares(self, num_rows: int) -> bool:
        """Whether this many rows are few enough that programs shall prepare q, k and v too.

        That saves a kernel, and costs every program registers and the preparation of its heads.
        Beside prompts, which have that kernel all the same, as many rows are planned as if it were.
        """
        heads = self.num_heads, self.num_kv_heads, self.head_size
        return prepares(num_rows, *heads, self.num_multiprocessors)

    def items_per_step(self, programs_per_multiprocessor: int) -> int:
        """The items that make this many programs on every multiprocessor."""
        programs = self.num_multiprocessors * programs_per_multiprocessor
        return max(-(-programs // self.programs_per_item), 1)

    def resident_items(self, num_rows: int, tuning: DecodeTuning) -> int:
        """The items whose programs are resident at once; 0 where the tuning does not ask for it."""
        registers = QKV_REGISTERS if self.prepares(num_rows) else self.registers(tuning)
        if tuning.registers is None or registers is None:
            return 0
        by_registers = REGISTER_FILE // (32 * tuning.num_warps * registers)
        by_memory = self.shared_memory // program_memory(tuning, self.block_d)
        programs = self.num_multiprocessors * min(by_registers, by_memory)
        return programs // self.programs_per_item

    def starts_in_waves(self, num_rows: int, tuning: DecodeTuning) -> bool:
        """Whether so many rows make more programs than the device begins at once."""
        at_once = tuning.wave_programs * self.num_multiprocessors
        resident = self.resident_items(num_rows, tuning)
        return num_rows * self.programs_per_item > at_once and not resident

    def max_items(self, num_rows: int, max_seq_len: int, tuning: DecodeTuning) -> int:
        """A bound on the items that the plan kernel can make of `num_rows` rows.

        Equal parts of a row are whole tiles, so a row of n items may be cut at lengths below
        `min_chunk`, but never into more than n.
        """
        if self.window is not None:
            # The tile in which the window begins is read from its start.
            max_seq_len = min(max_seq_len, self.window + tuning.tile - 1)
        shortest = tuning.fixed_chunk or tuning.min_chunk
        by_length = num_rows * max(-(-max_seq_len // shortest), 1)
        if tuning.fixed_chunk is not None:
            return by_length
        resident = self.resident_items(num_rows, tuning)
        most_resident = resident + (resident // 2 if tuning.second_wave else 0)
        if num_rows <= resident:
            # Those of the rows that have tokens, and one of each row that has none.
            return min(by_length, most_resident + num_rows - 1)
        longest_chunks = -(-num_rows * max_seq_len // tuning.max_chunk)
        by_chunk = max(longest_chunks, self.items_per_step(tuning.wave_programs))
        by_programs = self.items_per_step(tuning.max_programs)
        most = max(min(by_chunk, by_programs), most_resident)
        # Rounding a row's last chunk up makes one more item of it, and so does having no tokens.
        return min(by_length, num_rows + most)


class PlannedWork:
    """The device memory that every decode kernel needs: the step's items and partial results.

    All sizes follow from the shape and the tuning; nothing is allocated after construction, so a
    captured graph may keep the addresses. Not for use on two streams at once.
    """

    def __init__(self, shape: DecodeShape, tuning: DecodeTuning, device: torch.device) -> None:
        self.shape = shape
        self.tuning = tuning
        self.launch_options = launch_options(supports_dependent_launch(device))
        max_items = shape.max_items(shape.max_num_seqs, shape.max_seq_len, tuning)
        # A multiple of 16: Triton compiles another variant for integers that are not.
        self.capacity = -(-max_items // 16) * 16
        programs = self.capacity * shape.programs_per_item
        self.items = torch.zeros(
            (ITEM_FIELDS.value, self.capacity), dtype=torch.int32, device=device
        )
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.partial = torch.zeros(
            (programs, shape.partial_heads, shape.block_d), dtype=torch.float32, device=device
        )
        self.lse = torch.zeros((programs, shape.partial_heads), dtype=torch.float32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured kernel reads or writes, by name."""
        return {
            "decode_items": self.items,
            "decode_num_items": self.num_items,
            "decode_partial": self.partial,
            "decode_lse": self.lse,
        }

    def run(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        """Attend the planned rows. `k_cache` and `v_cache` [N, P, K, D] have equal strides.

        The innermost dimension of every tensor is contiguous. `max_seq_len` bounds the grid.
        """
        raise NotImplementedError

    def merge_round(self, num_rows: int) -> tuple[int, int]:
        """Parts of a row that its last program merges in a round, and the tokens of a chunk that
        take as long; (0, 0) where that does not count.
        """
        return 0, 0

    def grid(self, num_rows: int, max_seq_len: int) -> tuple[int]:
        """The programs of a decode kernel that so many rows of bounded lengths can need."""
        max_items = self.shape.max_items(num_rows, max_seq_len, self.tuning)
        return (min(max_items, self.capacity) * self.shape.programs_per_item,)

    def plan(self, seq_lens_B: Tensor, block_table: Tensor, block_size: int) -> None:
        """Cut the rows of `seq_lens_B` (int32, contiguous) into the items of the next runs.

        `block_table` [B, M] int32 names the blocks, of `block_size` tokens, that those runs will
        read; a length beyond M blocks is cut to them.
        """
        tuning, num_rows = self.tuning, seq_lens_B.shape[0]
        fixed = tuning.fixed_chunk
        resident = self.shape.resident_items(num_rows, tuning)
        round_parts, round_tokens = (0, 0) if fixed else self.merge_round(num_rows)
        plan_kernel[(1,)](
            seq_lens_B,
            block_table,
            self.items,
            self.num_items,
            block_table.stride(0),
            num_rows,
            block_table.shape[1] * block_size,
            resident_items=resident,
            wave_items=self.shape.items_per_step(tuning.wave_programs),
            # With a fixed chunk the capacity holds every row at its longest: nothing to raise.
            max_items=2**30 if fixed else self.shape.items_per_step(tuning.max_programs),
            min_chunk=fixed or tuning.min_chunk,
            max_chunk=fixed or tuning.max_chunk,
            item_capacity=self.capacity,
            BLOCK_ROWS=max(next_power_of_2(self.shape.max_num_seqs), PLAN_ROWS),
            BLOCK_SIZE=block_size,
            TILE=tuning.tile,
            WINDOW=self.shape.window or 0,
            ONE_WAVE=fixed is None and resident > 0,
            SECOND_WAVE=tuning.second_wave or 0,
            LONGEST_FIRST=self.shape.starts_in_waves(num_rows, tuning),
            ROUND_PARTS=round_parts,
            ROUND_TOKENS=round_tokens,
            **self.launch_options,
        )


class DecodeWorkspace(PlannedWork):
    """The planned work of keys and values, and the tickets by which their kernels merge."""

    def __init__(self, shape: DecodeShape, tuning: DecodeTuning, device: torch.device) -> None:
        super().__init__(shape, tuning, device)
        # The last program of a row leaves its ticket at 0 for the next layer.
        self.tickets = torch.zeros(
            (shape.max_num_seqs, shape.programs_per_item), dtype=torch.int32, device=device
        )

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"decode_tickets": self.tickets}

    def merge_round(self, num_rows: int) -> tuple[int, int]:
        if self.shape.prepares(num_rows):
            return self.shape.chunks_of(QKV_MERGE_ELEMENTS), QKV_MERGE_ROUND
        return self.shape.chunks_of(MERGE_ELEMENTS), MERGE_ROUND

    def run(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        queries = q_BHD, q_BHD.stride(0), q_BHD.stride(1)
        constants = self.shape.constants(k_cache.shape[1], self.tuning.tile)
        registers = self.shape.registers(self.tuning)
        self._launch(
            decode_kernel, queries, k_cache, v_cache, block_table, max_seq_len, scale, out_BHD,
            constants | ({"maxnreg": registers} if registers else {}),
        )  # fmt: skip

    def run_from_qkv(
        self,
        qkv_BX: Tensor,
        prep: QKPrep,
        positions_B: Tensor,
        slot_mapping_B: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        """`run` from packed q, k, v on, whose newest k and v are stored in their slots."""
        unprepared = (
            qkv_BX, qkv_BX.stride(0), prep.q_norm_weight, prep.k_norm_weight, prep.cos_sin_cache,
            positions_B, slot_mapping_B,
        )  # fmt: skip
        constants = self.shape.qkv_constants(k_cache.shape[1], self.tuning.tile, prep)
        self._launch(
            decode_qkv_kernel, unprepared, k_cache, v_cache, block_table, max_seq_len, scale,
            out_BHD, constants | {"maxnreg": QKV_REGISTERS},
        )  # fmt: skip

    def _launch(
        self,
        kernel: Any,
        inputs: Sequence[Tensor | int | None],
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
        constants: Mapping[str, int | float],
    ) -> None:
        """Launch a kernel over the planned items; `inputs` are the arguments that are its own."""
        kernel[self.grid(out_BHD.shape[0], max_seq_len)](
            *inputs,
            k_cache,
            v_cache,
            out_BHD,
            block_table,
            self.items,
            self.num_items,
            self.partial,
            self.lse,
            self.tickets,
            scale * LOG2_E,
            out_BHD.stride(0),
            out_BHD.stride(1),
            block_table.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            self.capacity,
            self.shape.programs_per_item,
            **constants,
            **self.launch_options,
            num_warps=self.tuning.num_warps,
            num_stages=self.tuning.num_stages,
        )


def triton_version() -> str:
    """The version of triton that runs the kernels."""
    return cast(str, triton.__version__)
