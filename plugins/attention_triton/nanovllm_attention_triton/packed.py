"""Launches attention over packed keys and values; see `packed_kernels`."""

from __future__ import annotations

from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E
from nanovllm_attention_triton.hopper_packed import HopperCall, run_hopper_packed
from nanovllm_attention_triton.hopper_prefill import aligned_rows
from nanovllm_attention_triton.packed_kernels import packed_kernel
from nanovllm_attention_triton.prefill import check_scale, count_row_blocks
from nanovllm_attention_triton.sizes import front_columns, padded_head_size
from nanovllm_attention_triton.tuning import HOPPER_SCORES, PackedTuning

MIN_BLOCK_V = 32
"""With 16 columns the kernel, as Triton 3.6.0 compiles it for Hopper in half precision, gave wrong
sums in the last tile of keys, and read where it may not."""


def packed_prefill(
    q_THD: Tensor,
    k_LHD: Tensor,
    v_LHV: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool,
    out_THV: Tensor,
    tuning: PackedTuning,
    lse_HT: Tensor | None = None,
    hopper: HopperCall | None = None,
) -> None:
    """Attend packed queries to the keys and values of their sequences, into `out_THV`.

    The innermost dimension of every tensor is contiguous; `query_start_loc` and `key_start_loc`
    [S + 1] are int32. `causal`: the last query of a sequence sees its last key, the one before it
    one key less; else each sees all. `lse_HT`, fp32, if given, gets each query's natural
    log-sum-exp. A query that sees no key gets 0 and -inf. `hopper`: what the kernel for Hopper
    needs, where it can serve; it does in calls of many scores, if rows are aligned. Raises
    UnsupportedError for a `scale` that is not positive, and for more queries than a grid holds.
    """
    check_scale(scale)
    num_seqs = query_start_loc.shape[0] - 1
    num_tokens, num_heads, key_size = q_THD.shape
    if num_seqs == 0 or max_query_len == 0 or num_tokens == 0:
        return
    num_queries = min(num_tokens, num_seqs * max_query_len)
    if (
        hopper is not None
        and num_heads * num_queries * hopper.max_key_len >= HOPPER_SCORES
        and aligned_rows(q_THD, k_LHD, v_LHV, out_THV)
    ):
        run_hopper_packed(
            q_THD, k_LHD, v_LHV, query_start_loc, key_start_loc, num_queries, scale, causal,
            out_THV, lse_HT, hopper,
        )  # fmt: skip
        return
    row_blocks = count_row_blocks(num_queries, num_seqs, 1, tuning.block_m)
    packed_kernel[(num_heads, row_blocks)](
        q_THD,
        k_LHD,
        v_LHV,
        out_THV,
        out_THV if lse_HT is None else lse_HT,
        query_start_loc,
        key_start_loc,
        num_seqs,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        k_LHD.stride(0),
        k_LHD.stride(1),
        v_LHV.stride(0),
        v_LHV.stride(1),
        out_THV.stride(0),
        out_THV.stride(1),
        0 if lse_HT is None else lse_HT.stride(0),
        **packed_constants(key_size, v_LHV.shape[2], causal, lse_HT is not None, tuning),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def packed_constants(
    key_size: int, value_size: int, causal: bool, with_lse: bool, tuning: PackedTuning
) -> dict[str, int | bool]:
    """The compile-time arguments of `packed_kernel`."""
    front = front_columns(key_size)
    return {
        "FRONT": front,
        "REST": key_size - front,
        "BLOCK_R": padded_head_size(key_size - front),
        "VALUE_SIZE": value_size,
        "BLOCK_V": max(padded_head_size(value_size), MIN_BLOCK_V),
        "CAUSAL": causal,
        "WITH_LSE": with_lse,
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
    }
