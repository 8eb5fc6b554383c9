"""Launches the prefill kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm_attention_triton.decode import LOG2_E, num_multiprocessors, padded_head_size
from nanovllm_attention_triton.hopper_prefill_kernel import hopper_prefill_kernel
from nanovllm_attention_triton.prefill_kernels import prefill_kernel
from nanovllm_attention_triton.tuning import (
    HOPPER_PREFILL,
    LARGE_CAPABILITIES,
    LARGE_TILE,
    WIDE,
    PrefillTuning,
)
from nanovllm_core.api import UnsupportedError

CAUSAL = (-1, 0)
"""The window of the plain causal mask: no bound to the left, nothing to the right."""
HOPPER = 9
"""The compute capability (major) of the tensor cores and register moves of the Hopper kernel."""
HOPPER_ROWS = 128
HOPPER_REGISTERS = 168
"""Per thread at the start, of twelve warps: what they then move among themselves."""
MAX_ROW_BLOCKS = 65535
"""CUDA's grids hold no more in their second dimension."""
COPY_ENGINE_CAPABILITY = (9, 0)
"""Hopper's, the first whose copy engine reads tiles of a tensor by its descriptor ("TMA")."""
COPY_ENGINE_ALIGNMENT = 16
"""Bytes that divide a descriptor's address and strides."""


def prefill_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens_S: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    out_THD: Tensor,
    tuning: PrefillTuning,
    *,
    window: tuple[int, int] = CAUSAL,
    soft_cap: float | None = None,
    lse_HT: Tensor | None = None,
) -> None:
    """Attend packed queries to their sequences' blocks, into `out_THD`.

    `k_cache` and `v_cache` [N, P, K, D] have equal strides; the innermost dimension of every tensor
    is contiguous. `block_table` [S, M], `seq_lens_S` [S] and `query_start_loc` [S + 1] are int32.
    `window` (left, right): a query at position p sees the keys p - left to p + right, -1 for no
    bound. `soft_cap` c turns scaled scores s into c * tanh(s / c). `lse_HT`, fp32, if given, gets
    each query's natural log-sum-exp. Raises UnsupportedError for a `scale` that is not positive,
    and for more queries than a grid holds.
    """
    if not scale > 0:
        raise UnsupportedError(
            f"attention triton scales scores by a positive number, not {scale}: the peak of a row "
            "is taken before the scale; negate q for a negative one"
        )
    num_seqs = block_table.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return
    num_heads, num_kv_heads = q_THD.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    # No sequence has more queries than `max_query_len`.
    num_queries = min(q_THD.shape[0], num_seqs * max_query_len)
    plain = window == CAUSAL and not soft_cap and lse_HT is None
    if plain and tuning.warp_roles and fits_hopper(q_THD, k_cache, v_cache, out_THD):
        _run_hopper_kernel(
            q_THD, k_cache, v_cache, block_table, seq_lens_S, query_start_loc, num_queries, scale,
            out_THD,
        )  # fmt: skip
        return
    row_blocks = count_row_blocks(num_queries, num_seqs, group, tuning.block_m)
    described = tuning.copy_engine and describable(k_cache, v_cache, tuning.block_n)
    k_desc, v_desc = (
        _tile_descriptor(x, tuning.block_n) if described else None for x in (k_cache, v_cache)
    )
    prefill_kernel[(num_kv_heads, row_blocks)](
        q_THD,
        k_cache,
        v_cache,
        k_desc,
        v_desc,
        out_THD,
        out_THD if lse_HT is None else lse_HT,
        block_table,
        seq_lens_S,
        query_start_loc,
        num_seqs,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        0 if lse_HT is None else lse_HT.stride(0),
        block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        GROUP=group,
        HEAD_SIZE=q_THD.shape[2],
        BLOCK_D=padded_head_size(q_THD.shape[2]),
        BLOCK_SIZE=k_cache.shape[1],
        LEFT=window[0],
        RIGHT=window[1],
        SOFT_CAP=soft_cap or 0.0,
        WITH_LSE=lse_HT is not None,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _run_hopper_kernel(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens_S: Tensor,
    query_start_loc: Tensor,
    num_queries: int,
    scale: float,
    out_THD: Tensor,
) -> None:
    """One program a multiprocessor, or fewer; each takes blocks of rows in turns."""
    num_seqs, num_kv_heads, head_size = block_table.shape[0], k_cache.shape[2], q_THD.shape[2]
    group = q_THD.shape[1] // num_kv_heads
    tuning = HOPPER_PREFILL[head_size]
    row_blocks = count_row_blocks(num_queries, num_seqs, group, HOPPER_ROWS)
    programs = min(row_blocks * num_kv_heads, num_multiprocessors(q_THD.device))
    tile = [1, tuning.block_n, 1, head_size]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    k_desc, v_desc = (
        GluonDescriptor(x, list(x.shape), list(x.stride()), tile, layout)
        for x in (k_cache, v_cache)
    )
    hopper_prefill_kernel[(programs,)](
        q_THD,
        k_desc,
        v_desc,
        out_THD,
        block_table,
        seq_lens_S,
        query_start_loc,
        num_seqs,
        row_blocks,
        num_kv_heads,
        -(-row_blocks * num_kv_heads // programs),
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        block_table.stride(0),
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        IN_ORDER=tuning.in_order,
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
    )


def fits_hopper(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, out_THD: Tensor) -> bool:
    """Whether the GPU is a Hopper, and dtype, head size, blocks and rows are the kernel's.

    Rows are copied in pieces of COPY_ENGINE_ALIGNMENT bytes, and Triton knows only of strides that
    16 divides that their pieces are aligned.
    """
    if not k_cache.is_cuda or torch.cuda.get_device_capability(k_cache.device)[0] != HOPPER:
        return False
    if q_THD.element_size() != 2 or q_THD.shape[2] not in HOPPER_PREFILL:
        return False
    rows = (*q_THD.stride()[:2], *out_THD.stride()[:2], q_THD.data_ptr(), out_THD.data_ptr())
    return not any(place % 16 for place in rows) and describable(
        k_cache, v_cache, HOPPER_PREFILL[q_THD.shape[2]].block_n
    )


def count_row_blocks(num_queries: int, num_seqs: int, group: int, block_m: int) -> int:
    """The row blocks that `find_row_block` numbers; UnsupportedError for more than a grid holds."""
    row_blocks = num_queries * group // block_m + num_seqs
    if row_blocks > MAX_ROW_BLOCKS:
        raise UnsupportedError(
            f"prefill of {num_queries} queries of {num_seqs} sequences makes {row_blocks} row "
            f"blocks and a grid holds {MAX_ROW_BLOCKS}; give fewer at once "
            "(limits.max_num_batched_tokens)"
        )
    return row_blocks


def describable(k_cache: Tensor, v_cache: Tensor, block_n: int) -> bool:
    """Whether the copy engine can read tiles of `block_n` tokens: no tile may cross a block."""
    if (
        k_cache.is_cuda
        and torch.cuda.get_device_capability(k_cache.device) < COPY_ENGINE_CAPABILITY
    ):
        return False
    sizes = [stride * k_cache.element_size() for stride in k_cache.stride()[:-1]]
    places = [k_cache.data_ptr(), v_cache.data_ptr(), *sizes]
    return k_cache.shape[1] % block_n == 0 and not any(
        place % COPY_ENGINE_ALIGNMENT for place in places
    )


def fits_large_tiles(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether heads are wide, and the copy engine and the shared memory there for large tiles."""
    if k_cache.shape[3] <= WIDE:
        return False
    if (
        k_cache.is_cuda
        and torch.cuda.get_device_capability(k_cache.device)[0] not in LARGE_CAPABILITIES
    ):
        return False
    return describable(k_cache, v_cache, LARGE_TILE)


def _tile_descriptor(cache: Tensor, block_n: int) -> TensorDescriptor:
    """Tiles [block_n, head size] of one head of one block of `cache` [N, P, K, D].

    Beyond the head size the copy engine fills in zeros.
    """
    block_d = padded_head_size(cache.shape[3])
    return TensorDescriptor(
        cache, list(cache.shape), list(cache.stride()), [1, block_n, 1, block_d]
    )
