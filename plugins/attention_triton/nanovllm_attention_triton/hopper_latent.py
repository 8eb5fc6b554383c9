"""Decode over latent rows by the kernel for Hopper GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E, num_multiprocessors
from nanovllm_attention_triton.decode_tuning import DecodeTuning, LatentTuning
from nanovllm_attention_triton.even_plan import even_plan_kernel
from nanovllm_attention_triton.latent_decode import LatentShape, LatentWorkspace
from nanovllm_attention_triton.prefill import describable
from nanovllm_attention_triton.sizes import next_power_of_2
from nanovllm_core.api import UnsupportedError

REGISTERS = 232
"""Per thread at the start, of eight warps, which then move them to where they are needed."""


@dataclass(frozen=True, slots=True)
class EvenShape(LatentShape):
    """The same sizes with an even plan, whose items are bounded otherwise."""

    def max_items(self, num_rows: int, max_seq_len: int, tuning: DecodeTuning) -> int:
        return num_rows + self.num_parts


class HopperLatentWorkspace(LatentWorkspace):
    """An even plan, and the persistent programs that attend it."""

    def __init__(self, shape: LatentShape, tuning: DecodeTuning, device: torch.device) -> None:
        super().__init__(shape, tuning, device)
        self.part_starts = torch.zeros(shape.num_parts + 1, dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"decode_part_starts": self.part_starts}

    def plan(self, seq_lens_B: Tensor, block_table: Tensor, block_size: int) -> None:
        shape = self.latent_shape
        even_plan_kernel[(1,)](
            seq_lens_B,
            block_table,
            self.items,
            self.num_items,
            self.part_starts,
            block_table.stride(0),
            len(seq_lens_B),
            block_table.shape[1] * block_size,
            shape.num_parts,
            -(-self.tuning.min_chunk // self.tuning.tile),
            self.capacity,
            BLOCK_ROWS=next_power_of_2(shape.max_num_seqs),
            BLOCK_PARTS=next_power_of_2(shape.num_parts + 1),
            BLOCK_SIZE=block_size,
            TILE=self.tuning.tile,
            **self.launch_options,
        )

    def _attend_items(
        self,
        q_BHD: Tensor,
        cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        if not cache.is_cuda:
            # Triton's interpreter has no Gluon. The portable kernel attends the items of any plan.
            super()._attend_items(q_BHD, cache, block_table, max_seq_len, scale, out_BHD)
            return
        if not describable(cache, cache, self.tuning.tile):
            raise UnsupportedError(
                f"the latent kernel for Hopper needs blocks of a multiple of {self.tuning.tile} "
                f"tokens and places that are multiples of 16 bytes; got a cache of shape "
                f"{tuple(cache.shape)}, strides {cache.stride()} and address "
                f"{cache.data_ptr():#x}: set latent_kernel to portable"
            )
        # Imported by those who run it: another Triton may have another Gluon.
        from nanovllm_attention_triton.hopper_latent_kernel import hopper_latent_kernel

        shape = self.latent_shape
        constants = shape.latent_constants(cache.shape[1], self.tuning.tile)
        hopper_latent_kernel[(shape.num_parts * shape.head_blocks,)](
            q_BHD,
            _descriptor(cache, self.tuning.tile, int(constants["BLOCK_V"])),
            _descriptor(cache, self.tuning.tile, int(constants["BLOCK_R"])),
            out_BHD,
            block_table,
            self.items,
            self.part_starts,
            self.partial,
            self.lse,
            scale * LOG2_E,
            q_BHD.stride(0),
            q_BHD.stride(1),
            out_BHD.stride(0),
            out_BHD.stride(1),
            block_table.stride(0),
            self.capacity,
            **constants,
            **self.launch_options,
            num_warps=4,
            maxnreg=REGISTERS,
        )


def make_latent_workspace(
    tuning: LatentTuning,
    device: torch.device,
    *,
    num_heads: int,
    value_size: int,
    rest_size: int,
    max_num_seqs: int,
    max_seq_len: int,
) -> LatentWorkspace:
    """The workspace for rows of `value_size` + `rest_size` columns, of the kernel of `tuning`."""
    kind, make = (
        (EvenShape, HopperLatentWorkspace) if tuning.persistent else (LatentShape, LatentWorkspace)
    )
    shape = kind(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=value_size,
        max_num_seqs=max_num_seqs,
        max_seq_len=max_seq_len,
        num_multiprocessors=num_multiprocessors(device),
        rest_size=rest_size,
        most_heads=tuning.most_heads,
    )
    return make(shape, tuning, device)


def _descriptor(cache: Tensor, tile: int, columns: int) -> object:
    """Tiles [1, tile, 1, columns] of `cache` [N, P, 1, D]."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(columns * cache.element_size(), 128),
        element_bitwidth=8 * cache.element_size(),
        rank=4,
    )
    block = [1, tile, 1, columns]
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), block, layout)
