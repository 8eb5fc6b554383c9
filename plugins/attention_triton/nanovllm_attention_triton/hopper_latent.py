"""Decode over latent rows by the kernel for Hopper GPUs, where it serves."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E
from nanovllm_attention_triton.hopper_prefill import GLUON_VERSIONS, on_hopper
from nanovllm_attention_triton.latent_decode import LatentShape, LatentWorkspace
from nanovllm_attention_triton.prefill import describable

REGISTERS = 168
"""Per thread at the start, of eight warps, which then move them to where they are needed."""
MOST_HEADS = 32
"""Of one program: the output of as many fills half of the registers."""
LEAST_COLUMNS = 16
"""A part of a row is loaded in pieces of 32 bytes at least."""


def hopper_kernel_serves(
    device: torch.device, dtype: torch.dtype, shape: LatentShape, block_size: int, tile: int
) -> bool:
    """Whether the GPU is a Hopper, Triton a known one, and dtype, heads and blocks fit."""
    return (
        on_hopper(device)
        and triton.__version__.startswith(GLUON_VERSIONS)
        and dtype.itemsize == 2
        and shape.block_heads <= MOST_HEADS
        and min(shape.head_size, shape.rest_size) >= LEAST_COLUMNS
        and block_size % tile == 0
    )


class HopperLatentWorkspace(LatentWorkspace):
    """The same memory and merge; where the copy engine can read the cache, another kernel."""

    def _attend_items(
        self,
        q_BHD: Tensor,
        cache: Tensor,
        block_table: Tensor,
        max_seq_len: int,
        scale: float,
        out_BHD: Tensor,
    ) -> None:
        if not describable(cache, cache, self.tuning.tile):
            super()._attend_items(q_BHD, cache, block_table, max_seq_len, scale, out_BHD)
            return
        # Imported by those who run it: another Triton may have another Gluon.
        from nanovllm_attention_triton.hopper_latent_kernel import hopper_latent_kernel

        shape = self.latent_shape
        constants = shape.latent_constants(cache.shape[1], self.tuning.tile)
        (most_programs,) = self.grid(len(q_BHD), max_seq_len)
        hopper_latent_kernel[(min(most_programs, shape.num_multiprocessors),)](
            q_BHD,
            _descriptor(cache, self.tuning.tile, int(constants["BLOCK_V"])),
            _descriptor(cache, self.tuning.tile, int(constants["BLOCK_R"])),
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
            self.capacity,
            **constants,
            **self.launch_options,
            num_warps=4,
            maxnreg=REGISTERS,
        )


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
