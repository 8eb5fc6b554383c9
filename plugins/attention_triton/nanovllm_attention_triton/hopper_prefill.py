"""Launches the prefill kernel for Hopper GPUs, and says what it serves."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E, num_multiprocessors
from nanovllm_attention_triton.hopper_limits import GLUON_VERSIONS, HOPPER
from nanovllm_attention_triton.prefill_tuning import HOPPER_PREFILL

BLOCK_M = 128
REGISTERS = 168
"""Per thread at the start, of twelve warps, which then move them to where they are needed."""
ALIGNMENT = 16
"""Bytes of a piece of a row; Triton takes a stride as a whole number of them if 16 divides it."""


@cache
def on_hopper(device: torch.device) -> bool:
    """Whether the device has the kernel's instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def hopper_kernel_serves(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
) -> bool:
    """Whether the GPU is a Hopper, Triton a known one, and dtype, heads and blocks fit."""
    tuning = HOPPER_PREFILL.get(head_size)
    return (
        on_hopper(device)
        and triton.__version__.startswith(GLUON_VERSIONS)
        and dtype.itemsize == 2
        and tuning is not None
        and block_size % tuning.block_n == 0
    )


def aligned_rows(*tensors: Tensor) -> bool:
    """Whether rows [T, H, D] begin where pieces of them can be copied, as far as Triton knows."""
    return not any(place % ALIGNMENT for x in tensors for place in (x.data_ptr(), *x.stride()[:-1]))


def run_hopper_kernel(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens_S: Tensor,
    query_start_loc: Tensor,
    row_blocks: int,
    scale: float,
    out_THD: Tensor,
    tickets: Tensor | None,
) -> None:
    """As `prefill_attention`, of `row_blocks` blocks of BLOCK_M rows, with the causal mask alone.

    `tickets` [1] int32 holds 0 before and after; launches that may run at once must not share it.
    """
    # Imported by those who run it: another Triton may have another Gluon.
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm_attention_triton.hopper_prefill_kernel import hopper_prefill_kernel

    if tickets is None:
        tickets = torch.zeros(1, dtype=torch.int32, device=q_THD.device)
    num_kv_heads, head_size = k_cache.shape[2:]
    tuning = HOPPER_PREFILL[head_size]
    programs = min(row_blocks * num_kv_heads, num_multiprocessors(q_THD.device))
    tile = [1, tuning.block_n, 1, head_size]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    k_desc, v_desc = (
        TensorDescriptor(cache, list(cache.shape), list(cache.stride()), tile, layout)
        for cache in (k_cache, v_cache)
    )
    hopper_prefill_kernel[(programs,)](
        q_THD,
        k_desc,
        v_desc,
        out_THD,
        block_table,
        seq_lens_S,
        query_start_loc,
        tickets,
        block_table.shape[0],
        row_blocks,
        num_kv_heads,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        block_table.stride(0),
        GROUP=q_THD.shape[1] // num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        IN_ORDER=tuning.in_order,
        num_warps=4,
        maxnreg=REGISTERS,
    )
