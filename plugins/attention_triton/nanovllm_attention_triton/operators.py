"""Packed and paged attention as functions, for code that has no engine.

    from nanovllm_attention_triton.operators import packed_attention, paged_attention

nanovllm-attention-sdpa has the same two; these have the same signatures, less `alibi_slopes`. Both
are custom operators, so that code that calls them compiles whole: `torch.compile(...,
fullgraph=True)`. Forward only.

Tensors are float16, bfloat16 or float32, of one dtype on one device; heads have 1 to
`MAX_HEAD_SIZE` elements, contiguous; each KV head serves a whole number of query heads; blocks, of
any number of tokens, have equal strides for K and V, except of dimensions of one element. Lengths
are read on the device alone, so no call waits for it and both can be captured. A length beyond
what its block table or its tensor holds is cut to that, so nothing is read outside; block ids in
use must name blocks that exist.

Masks are aligned to the last query and key. `window` (left, right) counts the keys that a query
sees beside its own, -1 for no bound: (-1, 0) is the causal mask. `scale` is above 0; another one
raises UnsupportedError. `soft_cap` c above 0 turns scaled scores s into c * tanh(s / c). A query
that sees no key gets zeros and a log-sum-exp of -inf.
Each head size, window edge, soft cap and block size compiles kernels of its own.

Shape suffixes as in `nanovllm_core.interfaces.attention`; S sequences, L keys of all of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import (
    DecodeShape,
    DecodeWorkspace,
    num_multiprocessors,
    shared_memory,
)
from nanovllm_attention_triton.decode_tuning import decode_tunings
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.plugin import MAX_HEAD_SIZE
from nanovllm_attention_triton.prefill import fits_large_tiles, prefill_attention
from nanovllm_attention_triton.prefill_tuning import prefill_tuning
from nanovllm_core.api import UnsupportedError

__all__ = ["MAX_HEAD_SIZE", "packed_attention", "paged_attention"]

NAMESPACE = __name__.partition(".")[0]


def packed_attention(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query_len: int,
    max_key_len: int,
    *,
    scale: float,
    block_table: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    soft_cap: float = 0.0,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences of different lengths.

    `k`, `v` [L, K, D], or blocks [N, P, K, D] with `block_table` [S, M] int32. `query_starts`,
    `key_starts` [S + 1] int32: running sums of lengths, of which none is above `max_query_len` and
    `max_key_len`. Returns out [T, H, D] and lse [H, T] fp32, or [0] unless `with_lse`.
    """
    _check_scale("packed_attention", scale)
    left, right = window
    out, lse = _packed(
        q_THD, k, v, query_starts, key_starts, block_table, max_query_len, max_key_len, scale,
        left, right, soft_cap, with_lse,
    )  # fmt: skip
    return out, lse


def paged_attention(
    q_BQHD: Tensor,
    k_NPKD: Tensor,
    v_NPKD: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    soft_cap: float = 0.0,
    may_split: bool = True,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the last Q tokens of each row to the blocks that its block table names.

    `block_table` [B, M] and `seq_lens` [B] int32; a row's length counts its queries. `may_split`
    False: no row's keys are divided among programs. Returns out [B, Q, H, D] and lse [B, H, Q]
    fp32, or [0] unless `with_lse`.
    """
    _check_scale("paged_attention", scale)
    batch, query_len = q_BQHD.shape[:2]
    left, right = window
    out, lse = _paged(
        q_BQHD, k_NPKD, v_NPKD, block_table, seq_lens, scale, left, right, soft_cap, may_split,
        with_lse,
    )  # fmt: skip
    return out, lse.view(-1, batch, query_len).transpose(0, 1) if with_lse else lse


def _check_scale(function: str, scale: float) -> None:
    """Refuse a scale that is not positive: kernels take the peak of a row before the scale."""
    if not scale > 0.0:
        raise UnsupportedError(
            f"{function}: scale={scale} is not supported: triton needs a positive one; negate q"
        )


# The operators are called with all of their arguments by place; `with_lse` is the last.


@torch.library.custom_op(f"{NAMESPACE}::packed_attention", mutates_args=())
def _packed(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    block_table: Tensor | None,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    query_starts = query_starts.clamp(0, q_THD.shape[0])
    if block_table is None:
        # Packed keys are a cache whose blocks hold one token each.
        key_starts = key_starts.clamp(0, k.shape[0])
        k, v = k.contiguous()[:, None], v.contiguous()[:, None]
        steps = torch.arange(max(max_key_len, 1), dtype=torch.int32, device=q_THD.device)
        block_table = key_starts[:-1, None].int() + steps
    return _prefill(
        q_THD, k, v, block_table, key_starts.diff(), query_starts, max_query_len, scale,
        (left, right), soft_cap, with_lse,
    )  # fmt: skip


@_packed.register_fake
def _(q_THD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_THD, with_lse=others[-1])


@torch.library.custom_op(f"{NAMESPACE}::paged_attention", mutates_args=())
def _paged(
    q_BQHD: Tensor,
    k_NPKD: Tensor,
    v_NPKD: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    may_split: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    batch, query_len = q_BQHD.shape[:2]
    if not batch:
        return _outputs(q_BQHD, with_lse)
    if query_len == 1 and may_split and not with_lse:
        window = left + 1 if left >= 0 else None
        out = _decode(q_BQHD, k_NPKD, v_NPKD, block_table, seq_lens, scale, window, soft_cap)
        return out, _lse(q_BQHD, with_lse)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q_BQHD.device) * query_len
    out, lse = _prefill(
        q_BQHD.flatten(0, 1), k_NPKD, v_NPKD, block_table, seq_lens, starts, query_len, scale,
        (left, right), soft_cap, with_lse,
    )  # fmt: skip
    return out.view(q_BQHD.shape), lse


@_paged.register_fake
def _(q_BQHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q_BQHD, with_lse=others[-1])


def _outputs(q: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    """New tensors for the output [..., H, D], contiguous, and the log-sum-exp."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _lse(q, with_lse)


def _lse(q: Tensor, with_lse: bool) -> Tensor:
    """[H, queries] float32, or empty without `with_lse`."""
    shape = (q.shape[-2], math.prod(q.shape[:-2])) if with_lse else (0,)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _prefill(
    q_THD: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
    window: tuple[int, int],
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the prefill kernel into new tensors."""
    strides = (*k_blocks.stride()[:-1], 1)
    if not strides == k_blocks.stride() == v_blocks.stride():
        # They differ where a dimension has one element. Descriptors need them alike there too.
        k_blocks, v_blocks = (x.as_strided(x.shape, strides) for x in (k_blocks, v_blocks))
    out, lse = _outputs(q_THD, with_lse)
    large = fits_large_tiles(k_blocks, v_blocks)
    capacity = block_table.shape[1] * k_blocks.shape[1]
    prefill_attention(
        q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous(),
        k_blocks,
        v_blocks,
        block_table.int().contiguous(),
        seq_lens.clamp(0, capacity).int(),
        query_starts.int().contiguous(),
        max_query_len,
        scale,
        out,
        prefill_tuning(q_THD.element_size(), q_THD.shape[-1], large, TritonOptions()),
        window=window,
        soft_cap=soft_cap,
        lse_HT=lse if with_lse else None,
    )
    return out, lse


def _decode(
    q_BQHD: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float,
) -> Tensor:
    """Run the decode kernels for one query per row, with a workspace made for the call."""
    batch, _, num_heads, head_size = q_BQHD.shape
    capacity = block_table.shape[1] * k_blocks.shape[1]
    num_kv_heads = k_blocks.shape[2]
    element_size = q_BQHD.element_size()
    device = {
        "num_multiprocessors": num_multiprocessors(q_BQHD.device),
        "shared_memory": shared_memory(q_BQHD.device),
    }
    _, tuning = decode_tunings(
        element_size, head_size, num_heads, num_kv_heads, batch, TritonOptions(), **device
    )[-1]
    shape = DecodeShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_num_seqs=batch,
        max_seq_len=capacity,
        window=window,
        soft_cap=soft_cap,
        **device,
        most_heads=tuning.most_heads,
    )
    workspace = DecodeWorkspace(shape, tuning, q_BQHD.device)
    block_table = block_table.int().contiguous()
    workspace.plan(seq_lens.int().contiguous(), block_table, k_blocks.shape[1])
    out, _ = _outputs(q_BQHD, with_lse=False)
    q_BHD = q_BQHD[:, 0]
    q_BHD = q_BHD if q_BHD.stride(-1) == 1 else q_BHD.contiguous()
    workspace.run(q_BHD, k_blocks, v_blocks, block_table, capacity, scale, out[:, 0])
    return out
