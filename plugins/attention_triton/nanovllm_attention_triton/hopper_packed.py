"""Launches attention over packed keys and values for Hopper GPUs, and says what it serves."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E, num_multiprocessors
from nanovllm_attention_triton.hopper_limits import GLUON_VERSIONS
from nanovllm_attention_triton.hopper_prefill import BLOCK_M, REGISTERS, on_hopper
from nanovllm_attention_triton.prefill import count_row_blocks
from nanovllm_attention_triton.prefill_tuning import HOPPER_PACKED
from nanovllm_attention_triton.sizes import front_columns


class HopperPlan(NamedTuple):
    """The arguments of a packed call that are not its tensors.

    `key_lens_S` int32: the keys of each sequence, `max_key_len` at most. `tickets` [1] int32 holds
    0 before and after; launches that may run at once must not share it.
    """

    key_lens_S: Tensor  # noqa: N815 - shape suffix
    max_key_len: int
    tickets: Tensor


def hopper_packed_serves(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int
) -> bool:
    """Whether the GPU is a Hopper, Triton a known one, and dtype and sizes fit."""
    return (
        on_hopper(device)
        and triton.__version__.startswith(GLUON_VERSIONS)
        and dtype.itemsize == 2
        and (key_size, value_size) in HOPPER_PACKED
    )


@cache
def _gluon() -> tuple[Any, Any, Any]:
    """The class of descriptors, the layout of tiles, and the kernel.

    Imported at the first launch, because other versions of Triton have another Gluon.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm_attention_triton.hopper_packed_kernel import hopper_packed_kernel

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor, layout, hopper_packed_kernel


def run_hopper_packed(
    q_THD: Tensor,
    k_LHD: Tensor,
    v_LHV: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    num_queries: int,
    scale: float,
    causal: bool,
    out_THV: Tensor,
    lse_HT: Tensor | None,
    plan: HopperPlan,
) -> None:
    """As `packed_prefill`, of at most `num_queries` queries of all sequences."""
    TensorDescriptor, layout, hopper_packed_kernel = _gluon()
    num_heads, key_size, value_size = *k_LHD.shape[1:], v_LHV.shape[2]
    constants = hopper_packed_constants(key_size, value_size)
    tile, front, rest = (constants[name] for name in ("BLOCK_N", "FRONT", "REST"))
    front_desc, rest_desc, v_desc = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tile, 1, columns], layout)
        for x, columns in ((k_LHD, front), (k_LHD, rest), (v_LHV, value_size))
    )
    if lse_HT is None:  # The kernel always writes it, so that one compilation serves both cases.
        lse_HT = q_THD.new_empty((num_heads, len(q_THD)), dtype=torch.float32)
    num_seqs = query_start_loc.shape[0] - 1
    row_blocks = count_row_blocks(num_queries, num_seqs, 1, BLOCK_M)
    programs = min(row_blocks * num_heads, num_multiprocessors(q_THD.device))
    hopper_packed_kernel[(programs,)](
        q_THD,
        front_desc,
        rest_desc,
        v_desc,
        out_THV,
        lse_HT,
        query_start_loc,
        key_start_loc,
        plan.key_lens_S,
        plan.tickets,
        num_seqs,
        row_blocks,
        num_heads,
        causal,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THV.stride(0),
        out_THV.stride(1),
        lse_HT.stride(0),
        **constants,
        num_warps=4,
        maxnreg=REGISTERS,
    )


def hopper_packed_constants(key_size: int, value_size: int) -> dict[str, int]:
    """The compile-time arguments of the kernel."""
    tuning, front = HOPPER_PACKED[key_size, value_size], front_columns(key_size)
    return {
        "FRONT": front,
        "REST": key_size - front,
        "VALUE_SIZE": value_size,
        "BLOCK_N": tuning.block_n,
        "STAGES": tuning.num_stages,
    }
