"""Launches the prefill kernel."""

from __future__ import annotations

from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E
from nanovllm_attention_triton.prefill_kernels import prefill_kernel
from nanovllm_attention_triton.tuning import PrefillTuning


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
    causal: bool = True,
    lse_HT: Tensor | None = None,
) -> None:
    """Attend packed queries to their sequences' pages, into `out_THD`.

    `k_cache` and `v_cache` [N, P, K, D] have equal strides; the innermost dimension of every tensor
    is contiguous. `block_table` [S, M], `seq_lens_S` [S] and `query_start_loc` [S + 1] are int32.
    `lse_HT`, fp32, if given, gets each query's natural log-sum-exp.
    """
    num_seqs = block_table.shape[0]
    if num_seqs == 0 or max_query_len == 0:
        return
    num_heads, num_kv_heads = q_THD.shape[1], k_cache.shape[2]
    grid = (num_heads, num_seqs, -(-max_query_len // tuning.block_m))
    prefill_kernel[grid](
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        out_THD if lse_HT is None else lse_HT,
        block_table,
        seq_lens_S,
        query_start_loc,
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
        GROUP=num_heads // num_kv_heads,
        HEAD_SIZE=q_THD.shape[2],
        PAGE=k_cache.shape[1],
        CAUSAL=causal,
        WITH_LSE=lse_HT is not None,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
