"""Launches the kernels that decode over latent rows; see `latent_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E, DecodeShape, PlannedWork
from nanovllm_attention_triton.decode_tuning import DecodeTuning
from nanovllm_attention_triton.latent_kernels import latent_decode_kernel, latent_merge_kernel
from nanovllm_attention_triton.sizes import padded_head_size

MERGE_ELEMENTS = 4096
"""Numbers of parts that a program of the merge reads at a time."""
MERGE_COLUMNS = (128, 512)
"""Columns that a program of the merge averages: of few rows, and of many."""
MERGE_PROGRAMS = 8
"""Rows are few while the merge has at most so many programs per multiprocessor."""


@dataclass(frozen=True, slots=True)
class LatentShape(DecodeShape):
    """The sizes of decode over latent rows, which are the keys and the values of all heads.

    `head_size` is that of a value, and `num_kv_heads` is 1. A row has `rest_size` columns more,
    behind its value.
    """

    rest_size: int = 0

    @property
    def num_parts(self) -> int:
        """The parts of an even plan: with all blocks of heads one program per multiprocessor."""
        return max(self.num_multiprocessors // self.head_blocks, 1)

    def merge_constants(self) -> dict[str, int | float]:
        """The compile-time arguments that both kernels have."""
        return {
            "NUM_HEADS": self.num_heads,
            "BLOCK_H": self.block_heads,
            "HEAD_BLOCKS": self.head_blocks,
            "PARTIAL_HEADS": self.partial_heads,
            "VALUE_SIZE": self.head_size,
            "BLOCK_V": self.block_d,
        }

    def latent_constants(self, block_size: int, tile: int) -> dict[str, int | float]:
        """The compile-time arguments of `latent_decode_kernel`."""
        return self.merge_constants() | {
            "REST_SIZE": self.rest_size,
            "BLOCK_R": padded_head_size(self.rest_size),
            "BLOCK_SIZE": block_size,
            "TILE": tile,
        }

    def merge_columns(self, num_rows: int, tuning: DecodeTuning) -> int:
        """The columns of one program of the merge: few where rows are, to share the reading.

        With chunks of a fixed length always few: the columns set the order in which the chunks are
        summed, and a row shall have the same bits in every batch.
        """
        narrow, wide = (min(columns, self.block_d) for columns in MERGE_COLUMNS)
        if tuning.fixed_chunk is not None:
            return narrow
        programs = num_rows * self.num_heads * (self.block_d // narrow)
        return narrow if programs <= MERGE_PROGRAMS * self.num_multiprocessors else wide


class LatentWorkspace(PlannedWork):
    """The device memory of decode over latent rows, and its launches."""

    def __init__(self, shape: LatentShape, tuning: DecodeTuning, device: torch.device) -> None:
        super().__init__(shape, tuning, device)
        self.latent_shape = shape

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
        """See `PlannedWork.run`. `v_cache` is the front of `k_cache`, which alone is read."""
        if len(q_BHD) == 0:
            return
        self._attend_items(q_BHD, k_cache, block_table, max_seq_len, scale, out_BHD)
        self._merge_chunks(out_BHD)

    def _attend_items(
        self,
        q_BHD: Tensor,
        cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        """Write the outputs of rows of one chunk, and the parts of others."""
        latent_decode_kernel[self.grid(len(q_BHD), max_seq_len)](
            q_BHD,
            cache,
            out_BHD,
            block_table,
            self.items,
            self.num_items,
            self.partial,
            self.lse,
            scale * LOG2_E,
            q_BHD.stride(0),
            q_BHD.stride(1),
            out_BHD.stride(0),
            out_BHD.stride(1),
            block_table.stride(0),
            cache.stride(0),
            cache.stride(1),
            self.capacity,
            **self.latent_shape.latent_constants(cache.shape[1], self.tuning.tile),
            **self.launch_options,
            num_warps=self.tuning.num_warps,
            num_stages=self.tuning.num_stages,
        )

    def _merge_chunks(self, out_BHD: Tensor) -> None:
        """Write the outputs of rows of several chunks."""
        shape, num_rows = self.latent_shape, len(out_BHD)
        columns = shape.merge_columns(num_rows, self.tuning)
        latent_merge_kernel[(num_rows * shape.num_heads * (shape.block_d // columns),)](
            self.partial,
            self.lse,
            out_BHD,
            self.items,
            out_BHD.stride(0),
            out_BHD.stride(1),
            self.capacity,
            **shape.merge_constants(),
            COLUMNS=columns,
            CHUNKS=max(MERGE_ELEMENTS // columns, 1),
            **self.launch_options,
            num_warps=2 if columns <= 128 else 4,
        )
