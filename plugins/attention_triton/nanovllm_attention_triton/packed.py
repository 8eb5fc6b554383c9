"""Attention over packed keys and values: the choice of the kernel, and its launch."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import LOG2_E
from nanovllm_attention_triton.hopper_packed import (
    HopperPlan,
    hopper_packed_serves,
    run_hopper_packed,
)
from nanovllm_attention_triton.hopper_prefill import aligned_rows
from nanovllm_attention_triton.packed_kernels import packed_kernel
from nanovllm_attention_triton.prefill import check_scale, count_row_blocks, has_large_memory
from nanovllm_attention_triton.prefill_tuning import HOPPER_SCORES, PackedTuning, packed_tuning
from nanovllm_attention_triton.sizes import front_columns, padded_head_size
from nanovllm_core.api import AttentionConfig, PackedMetadata

MIN_BLOCK_V = 32
"""With 16 columns the kernel, as Triton 3.6.0 compiles it for Hopper in half precision, gave wrong
sums in the last tile of keys, and read where it may not."""


class PackedPrompts:
    """The packed calls of a backend: their plans, and the kernels that serve them."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        sizes = (config.latent.key_size, config.latent.value_size) if config.latent else (0, 0)
        self.has_warp_roles = hopper_packed_serves(config.device, config.dtype, *sizes)
        """Whether calls of many scores run on the kernel for Hopper."""
        self._tickets: Tensor | None = None
        self._tried = set[tuple[bool, bool]]()

    def plan(self, metadata: PackedMetadata) -> None:
        """See `AttentionBackend.plan_packed`."""
        if not self.has_warp_roles:
            return
        if self._tickets is None:
            self._tickets = torch.zeros(1, dtype=torch.int32, device=self._config.device)
        key_lens_S = metadata.key_start_loc.diff()
        metadata.plan = HopperPlan(key_lens_S, metadata.max_key_len, self._tickets)

    def run(
        self,
        q_THD: Tensor,
        k_LHD: Tensor,
        v_LHV: Tensor,
        metadata: PackedMetadata,
        out_THV: Tensor,
        lse_HT: Tensor | None,
    ) -> None:
        """See `AttentionBackend.run_packed`."""
        plan: HopperPlan | None = metadata.plan
        plans = [plan]
        kind = metadata.causal, lse_HT is None
        if plan is not None and kind not in self._tried:
            # The first calls of each kind are the start's trial: no request shall be the first to
            # have the kernel of shorter or longer ones compiled. The last run's results stay.
            self._tried.add(kind)
            plans = [None, plan._replace(max_key_len=sys.maxsize), plan]
        large = has_large_memory(q_THD.device)
        tuning = packed_tuning(q_THD.element_size(), q_THD.shape[-1], v_LHV.shape[-1], large)
        for one in plans:
            packed_prefill(
                q_THD,
                k_LHD,
                v_LHV,
                metadata.query_start_loc,
                metadata.key_start_loc,
                metadata.max_query_len,
                self._config.scale,
                metadata.causal,
                out_THV,
                tuning,
                lse_HT,
                one,
            )


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
    plan: HopperPlan | None = None,
) -> None:
    """Attend packed queries to the keys and values of their sequences, into `out_THV`.

    The innermost dimension of every tensor is contiguous; `query_start_loc` and `key_start_loc`
    [S + 1] are int32. `causal`: the last query of a sequence sees its last key, the one before it
    one key less; else each sees all. `lse_HT`, fp32, if given, gets each query's natural
    log-sum-exp. A query that sees no key gets 0 and -inf. With a plan for it, the kernel for Hopper
    serves calls of many scores whose rows are aligned. Raises UnsupportedError for a `scale` that
    is not positive, and for more queries than a grid holds.
    """
    check_scale(scale)
    num_seqs = query_start_loc.shape[0] - 1
    num_tokens, num_heads, key_size = q_THD.shape
    if num_seqs == 0 or max_query_len == 0 or num_tokens == 0:
        return
    num_queries = min(num_tokens, num_seqs * max_query_len)
    if (
        plan is not None
        and len(k_LHD) > 0  # the copy engine describes no empty tensor
        and num_heads * num_queries * plan.max_key_len >= HOPPER_SCORES
        and aligned_rows(q_THD, k_LHD, v_LHV, out_THV)
    ):
        run_hopper_packed(
            q_THD, k_LHD, v_LHV, query_start_loc, key_start_loc, num_queries, scale, causal,
            out_THV, lse_HT, plan,
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
