"""Launches the prefill kernels: that for Hopper where it serves, else that for every GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm_attention_triton import hopper_prefill
from nanovllm_attention_triton.decode import LOG2_E, num_multiprocessors
from nanovllm_attention_triton.prefill_kernels import prefill_kernel
from nanovllm_attention_triton.prefill_tuning import (
    HOPPER_BLOCKS,
    HOPPER_PREFILL,
    HOPPER_QUERIES,
    LARGE_CAPABILITIES,
    LARGE_TILE,
    PrefillTuning,
)
from nanovllm_attention_triton.sizes import WIDE, padded_head_size
from nanovllm_attention_triton.split_work import SplitWork, item_arguments
from nanovllm_core.api import UnsupportedError

CAUSAL = (-1, 0)
"""The window of the plain causal mask: no bound to the left, nothing to the right."""
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
    tickets: Tensor | None = None,
    splits: SplitWork | None = None,
) -> None:
    """Attend packed queries to their sequences' blocks, into `out_THD`.

    `k_cache` and `v_cache` [N, P, K, D] have equal strides; the innermost dimension of every tensor
    is contiguous. `block_table` [S, M], `seq_lens_S` [S] and `query_start_loc` [S + 1] are int32.
    `window` (left, right): a query at position p sees the keys p - left to p + right, -1 for no
    bound. `soft_cap` c turns scaled scores s into c * tanh(s / c). `lse_HT`, fp32, if given, gets
    each query's natural log-sum-exp. `tickets` [1] int32, zero, is memory of the kernel for Hopper,
    which allocates where it gets none. `splits`, which serves the step and has its plan, for this
    window and the plain kernel's rows and tiles: its items are attended; not with `lse_HT`. Raises
    UnsupportedError for a `scale` that is not positive, and for more queries than a grid holds.
    """
    check_scale(scale)
    num_seqs = block_table.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return
    num_heads, num_kv_heads = q_THD.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    # No sequence has more queries than `max_query_len`.
    num_queries = min(q_THD.shape[0], num_seqs * max_query_len)
    plain = window == CAUSAL and not soft_cap and lse_HT is None
    row_blocks = count_row_blocks(num_queries, num_seqs, group, hopper_prefill.BLOCK_M)
    enough = (
        num_queries >= HOPPER_QUERIES * num_seqs
        and row_blocks * num_kv_heads >= HOPPER_BLOCKS * num_multiprocessors(q_THD.device)
    )
    if tuning.warp_roles and plain and enough and fits_hopper(q_THD, k_cache, v_cache, out_THD):
        hopper_prefill.run_hopper_kernel(
            q_THD, k_cache, v_cache, block_table, seq_lens_S, query_start_loc, row_blocks, scale,
            out_THD, tickets,
        )  # fmt: skip
        return
    row_blocks = count_row_blocks(num_queries, num_seqs, group, tuning.block_m)
    described = tuning.copy_engine and describable(k_cache, v_cache, tuning.block_n)
    k_desc, v_desc = (
        _tile_descriptor(x, tuning.block_n) if described else None for x in (k_cache, v_cache)
    )
    items = splits.shape.most_items(row_blocks) if splits else row_blocks
    prefill_kernel[(num_kv_heads, items)](
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
        **item_arguments(splits),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if splits:
        splits.merge(row_blocks, out_THD)


def check_scale(scale: float) -> None:
    """Refuse, by UnsupportedError, a scale that is not positive."""
    if not scale > 0:
        raise UnsupportedError(
            f"attention triton scales scores by a positive number, not {scale}: the peak of a row "
            "is taken before the scale; negate q for a negative one"
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
    if not has_copy_engine(k_cache.device):
        return False
    sizes = [stride * k_cache.element_size() for stride in k_cache.stride()[:-1]]
    places = [k_cache.data_ptr(), v_cache.data_ptr(), *sizes]
    return k_cache.shape[1] % block_n == 0 and not any(
        place % COPY_ENGINE_ALIGNMENT for place in places
    )


def fits_hopper(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, out_THD: Tensor) -> bool:
    """Whether the kernel for Hopper serves these tensors."""
    block_size, _, head_size = k_cache.shape[1:]
    return (
        hopper_prefill.hopper_kernel_serves(q_THD.device, q_THD.dtype, head_size, block_size)
        and hopper_prefill.aligned_rows(q_THD, out_THD)
        and describable(k_cache, v_cache, HOPPER_PREFILL[head_size].block_n)
    )


def fits_large_tiles(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether heads are wide, and the copy engine and the shared memory there for large tiles."""
    if k_cache.shape[3] <= WIDE:
        return False
    return has_large_memory(k_cache.device) and describable(k_cache, v_cache, LARGE_TILE)


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the device can read tiles by descriptor; in the interpreter, yes."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= COPY_ENGINE_CAPABILITY


@cache
def has_large_memory(device: torch.device) -> bool:
    """Whether a program may have 227 KiB of shared memory; in the interpreter, yes."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device)[0] in LARGE_CAPABILITIES


def _tile_descriptor(cache: Tensor, block_n: int) -> TensorDescriptor:
    """Tiles [block_n, head size] of one head of one block of `cache` [N, P, K, D].

    Beyond the head size the copy engine fills in zeros.
    """
    block_d = padded_head_size(cache.shape[3])
    return TensorDescriptor(
        cache, list(cache.shape), list(cache.stride()), [1, block_n, 1, block_d]
    )
