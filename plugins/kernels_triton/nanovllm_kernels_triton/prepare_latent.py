"""Everything between the projections and latent attention, in one kernel for q and rows.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.api import LatentPrep
from nanovllm_core.kernels import cdiv, next_power_of_2

_HEADS_PER_PROGRAM = 4
"""Heads of 192 by four give each lane of one warp three 16-byte accesses, and enough programs."""


def prepare_latent(
    q_THD: Tensor,
    rows_TR: Tensor,
    prep: LatentPrep,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache_NPR: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """`KernelSet.prepare_latent`; `options` are those of dependent launch."""
    num_tokens, num_heads, head_size = q_THD.shape
    latent_size, rotated = len(prep.norm_weight), prep.cos_sin_cache.shape[1]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    block_heads = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    prepare_latent_kernel[(num_tokens, 1 + cdiv(num_heads, block_heads))](
        q_THD, rows_TR, prep.norm_weight, prep.cos_sin_cache, positions_T, slot_mapping_T,
        out_THD, cache_NPR,
        q_THD.stride(0), q_THD.stride(1), rows_TR.stride(0),
        cache_NPR.stride(0), cache_NPR.stride(1),
        EPS=prep.eps,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        LATENT=latent_size,
        ROTATED=rotated,
        BLOCK_SIZE=cache_NPR.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_NOPE=next_power_of_2(head_size - rotated),
        BLOCK_LATENT=next_power_of_2(latent_size),
        BLOCK_PAIRS=next_power_of_2(rotated // 2),
        num_warps=1,
        **options,
    )  # fmt: skip
    return out_THD


@triton.jit
def _rotate(
    x_ptr, x_stride, cos_sin_ptr, out_ptr, out_stride, mask_H,
    ROTATED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Turn numbers 2i and 2i + 1 of each head; they are loaded side by side and split in lanes."""
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    mask = mask_H[:, None] & (dims < ROTATED)
    pairs = tl.arange(0, BLOCK_PAIRS)
    pair_mask = pairs < ROTATED // 2
    cos = tl.load(cos_sin_ptr + pairs, mask=pair_mask, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + ROTATED // 2 + pairs, mask=pair_mask, other=0.0)[None, :]
    x = tl.load(x_ptr + heads * x_stride + dims, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_PAIRS, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    turned = tl.reshape(turned, (BLOCK_HEADS, 2 * BLOCK_PAIRS)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads * out_stride + dims, turned, mask=mask)


@triton.jit
def prepare_latent_kernel(
    q_ptr, rows_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slot_mapping_ptr, out_ptr, cache_ptr,
    q_stride, head_stride, row_stride, block_stride, token_stride,
    EPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per token for its row, and one for each group of heads of q behind it.

    DEPENDENT: see `nanovllm_core.kernels.launch_options`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) - 1
    cos_sin_ptr += tl.load(positions_ptr + token).to(tl.int64) * ROTATED

    if group < 0:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            rows_ptr += token * row_stride
            cache_ptr += slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
            columns = tl.arange(0, BLOCK_LATENT)
            mask = columns < LATENT
            weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
            x = tl.load(rows_ptr + columns, mask=mask, other=0.0)
            wide = x.to(tl.float32)
            normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + EPS)
            if weight.dtype == x.dtype:
                normed = normed.to(x.dtype).to(tl.float32)
            normed = (normed * weight.to(tl.float32)).to(x.dtype)
            tl.store(cache_ptr + columns, normed.to(cache_ptr.dtype.element_ty), mask=mask)
            one = tl.arange(0, 1) == 0
            _rotate(
                rows_ptr + LATENT, 0, cos_sin_ptr, cache_ptr + LATENT, 0, one,
                ROTATED, 1, BLOCK_PAIRS,
            )  # fmt: skip
    else:
        first = group * BLOCK_HEADS
        mask_H = first + tl.arange(0, BLOCK_HEADS) < NUM_HEADS
        q_ptr += token * q_stride + first * head_stride
        out_ptr += (token * NUM_HEADS + first) * HEAD_SIZE
        NOPE: tl.constexpr = HEAD_SIZE - ROTATED
        heads = tl.arange(0, BLOCK_HEADS)[:, None]
        dims = tl.arange(0, BLOCK_NOPE)[None, :]
        mask = mask_H[:, None] & (dims < NOPE)
        nope = tl.load(q_ptr + heads * head_stride + dims, mask=mask)
        tl.store(out_ptr + heads * HEAD_SIZE + dims, nope, mask=mask)
        _rotate(
            q_ptr + NOPE, head_stride, cos_sin_ptr, out_ptr + NOPE, HEAD_SIZE, mask_H,
            ROTATED, BLOCK_HEADS, BLOCK_PAIRS,
        )  # fmt: skip
