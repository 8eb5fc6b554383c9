"""Everything between the qkv projection and attention, in one kernel that reads qkv once.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Reason: Triton compiles these functions; their arguments have no Python types.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_core.api import QKPrep
from nanovllm_core.kernels import cdiv, next_power_of_2
from nanovllm_kernels_triton.multiprocessors import MULTIPROCESSORS

_HEADS_PER_PROGRAM = 8
"""Eight heads of 128 give each lane of one warp four 16-byte accesses, and enough programs."""
_HEADS_OF_SOME_TOKENS = 2
"""With more than _FEW_TOKENS they end sooner, while those of eight would leave multiprocessors
idle. With fewer, so many programs delay decode attention, which starts meanwhile."""
_FEW_TOKENS = 8


def prepare_qkv(
    qkv_TX: Tensor,
    prep: QKPrep,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """`KernelSet.prepare_qkv`; `options` are those of dependent launch."""
    num_tokens, num_heads, num_kv_heads = len(qkv_TX), prep.num_heads, prep.num_kv_heads
    head_size, rotary_size = prep.head_size, prep.cos_sin_cache.shape[1]
    q_THD = qkv_TX.new_empty((num_tokens, num_heads, head_size))
    block_heads = _block_heads(num_tokens, num_heads, num_kv_heads)
    num_groups = cdiv(num_heads, block_heads) + 2 * cdiv(num_kv_heads, block_heads)
    prepare_qkv_kernel[(num_tokens, num_groups)](
        qkv_TX, prep.q_norm_weight, prep.k_norm_weight, prep.cos_sin_cache,
        positions_T, slot_mapping_T, q_THD, k_cache_NPKD, v_cache_NPKD,
        qkv_TX.stride(0), *k_cache_NPKD.stride()[:3], *v_cache_NPKD.stride()[:3],
        EPS=prep.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=rotary_size // 2,
        BLOCK_SIZE=k_cache_NPKD.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=next_power_of_2(rotary_size // 2),
        BLOCK_REST=next_power_of_2(head_size - rotary_size),
        BLOCK_HEAD=next_power_of_2(head_size),
        num_warps=1,
        **options,
    )  # fmt: skip
    return q_THD


def _block_heads(num_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Heads of a program, a power of two."""
    most = _HEADS_PER_PROGRAM
    programs = num_tokens * (cdiv(num_heads, most) + 2 * cdiv(num_kv_heads, most))
    if num_tokens > _FEW_TOKENS and programs <= MULTIPROCESSORS:
        most = _HEADS_OF_SOME_TOKENS
    return min(most, next_power_of_2(num_heads))


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_rotate_store(
    x_ptr, weight_ptr, cos_sin_ptr, out_ptr, out_stride, mask_H,
    EPS: tl.constexpr, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate BLOCK_HEADS heads of one token; `out_stride` separates heads in the output.

    A head is loaded as the two halves that rotate into each other, and the rest that does not
    rotate, so that no element moves between lanes.
    """
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    mask = mask_H[:, None] & (half < HALF)
    low = _load(x_ptr + heads * HEAD_SIZE + half, mask)
    high = _load(x_ptr + heads * HEAD_SIZE + HALF + half, mask)
    cos = _load(cos_sin_ptr + half, half < HALF)
    sin = _load(cos_sin_ptr + HALF + half, half < HALF)
    if BLOCK_REST > 0:
        rest_dim = tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = mask_H[:, None] & (rest_dim < HEAD_SIZE - 2 * HALF)
        rest = _load(x_ptr + heads * HEAD_SIZE + 2 * HALF + rest_dim, rest_mask)

    if weight_ptr is not None:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_SIZE + EPS)[:, None]
        low *= scale * _load(weight_ptr + half, half < HALF)
        high *= scale * _load(weight_ptr + HALF + half, half < HALF)
        if BLOCK_REST > 0:
            rest *= scale * _load(weight_ptr + 2 * HALF + rest_dim, rest_dim < HEAD_SIZE - 2 * HALF)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptrs = out_ptr + heads * out_stride + half
    tl.store(out_ptrs, (low * cos - high * sin).to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, (high * cos + low * sin).to(dtype), mask=mask)
    if BLOCK_REST > 0:
        rest_ptrs = out_ptr + heads * out_stride + 2 * HALF + rest_dim
        tl.store(rest_ptrs, rest.to(dtype), mask=rest_mask)


@triton.jit
def prepare_qkv_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr,
    positions_ptr, slot_mapping_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    qkv_stride,
    k_block_stride, k_token_stride, k_head_stride,
    v_block_stride, v_token_stride, v_head_stride,
    EPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per token and group of heads: q's groups first, then k's, then v's.

    DEPENDENT: see `nanovllm_core.kernels.launch_options`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    qkv_ptr += token * qkv_stride
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_sin_ptr += position * (2 * HALF)

    if group < Q_GROUPS:
        first = group * BLOCK_HEADS
        mask_H = first + tl.arange(0, BLOCK_HEADS) < NUM_HEADS
        _norm_rotate_store(
            qkv_ptr + first * HEAD_SIZE, q_weight_ptr, cos_sin_ptr,
            q_ptr + (token * NUM_HEADS + first) * HEAD_SIZE, HEAD_SIZE, mask_H,
            EPS, HEAD_SIZE, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        kv_group = group - Q_GROUPS
        if slot >= 0 and kv_group < KV_GROUPS:
            first = kv_group * BLOCK_HEADS
            mask_H = first + tl.arange(0, BLOCK_HEADS) < NUM_KV_HEADS
            out_ptr = k_cache_ptr + block * k_block_stride + offset * k_token_stride
            _norm_rotate_store(
                qkv_ptr + (NUM_HEADS + first) * HEAD_SIZE, k_weight_ptr, cos_sin_ptr,
                out_ptr + first * k_head_stride, k_head_stride, mask_H,
                EPS, HEAD_SIZE, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        elif slot >= 0:
            first = (kv_group - KV_GROUPS) * BLOCK_HEADS
            heads = first + tl.arange(0, BLOCK_HEADS)[:, None]
            dims = tl.arange(0, BLOCK_HEAD)[None, :]
            mask = (heads < NUM_KV_HEADS) & (dims < HEAD_SIZE)
            v = _load(qkv_ptr + (NUM_HEADS + NUM_KV_HEADS + heads) * HEAD_SIZE + dims, mask)
            out_ptr = v_cache_ptr + block * v_block_stride + offset * v_token_stride
            out = v.to(v_cache_ptr.dtype.element_ty)
            tl.store(out_ptr + heads * v_head_stride + dims, out, mask=mask)
