"""flash-attn's two paged entry points, with flash-attn 2's own signatures, on these kernels.

Code written for flash-attn runs by changing its import:

    from nanovllm_attention_triton.compat import flash_attn_varlen_func, flash_attn_with_kvcache

Every parameter is honoured or refused by its name; nothing is ignored. Forward only: inputs that
require a gradient are refused. K and V pages may hold any number of tokens. A query that sees no
key gets zeros and a log-sum-exp of -inf. Both functions compile whole, for their work is done by
the custom operators of `compat_ops`: `torch.compile(..., fullgraph=True)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_triton.compat_ops import (
    append_to_cache,
    attend_cache,
    attend_packed,
    refuse,
)
from nanovllm_attention_triton.plugin import HEAD_SIZES

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences of different lengths.

    `q` [T, H, D]; `k`, `v` [total keys, K, D], or pages [N, P, K, D] with `block_table` [S, M]
    int32; `cu_seqlens_q`, `cu_seqlens_k` [S + 1] int32. Masks are aligned to the last query and
    key; `window_size` (left, right) counts the keys beside a query's own, -1 for no bound;
    `softcap` 0.0 is none. Each window and soft cap compiles kernels of its own.

    Returns out [T, H, D]; with `return_attn_probs` (out, softmax_lse [H, T] fp32, an empty tensor
    where flash-attn shows dropout's pattern). The result is always `deterministic`. Lengths that
    lie on a GPU are not compared with `max_seqlen_q` and `max_seqlen_k`, which would wait for them.
    Raises UnsupportedError for what the kernels cannot do.
    """
    name = "flash_attn_varlen_func"
    if dropout_p != 0.0:
        refuse(name, "dropout_p", dropout_p, "has no dropout; pass 0.0")
    left, right = _masking(name, causal, window_size, softcap, alibi_slopes)
    _check_tensors(name, q, k, v)
    out, lse = attend_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        max_seqlen_q,
        max_seqlen_k,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        left,
        right,
        softcap,
        return_attn_probs,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of a few new queries per row to a cache, after storing `k` and `v` in it, if given.

    `q` [B, Q, H, D]; the caches [rows, tokens, K, D], or pages [N, P, K, D] with `block_table`
    [B, M] int32; `k`, `v` [B, new, K, D] go to the positions from `cache_seqlens` on, in place.
    Returns out [B, Q, H, D], with `return_softmax_lse` also softmax_lse [B, H, Q] fp32.
    `num_splits` of 1 never splits the context, 0 lets the device choose. `rotary_interleaved` says
    nothing without `rotary_cos`, which is refused: rotate q and k before the call. Lengths that lie
    on a GPU are not compared with the cache's capacity, which would wait for them.
    """
    name = "flash_attn_with_kvcache"
    for parameter, value in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if value is not None:
            refuse(name, parameter, "tensor", "does not rotate; rotate q and k before the call")
    if cache_leftpad is not None:
        refuse(name, "cache_leftpad", "tensor", "starts every row at token 0; pass None")
    if num_splits not in (0, 1):
        refuse(
            name, "num_splits", num_splits, "splits by measured constants; pass 0, or 1 for none"
        )
    if block_table is not None and cache_batch_idx is not None:
        refuse(name, "cache_batch_idx", "tensor", "takes it or block_table, not both")
    left, right = _masking(name, causal, window_size, softcap, alibi_slopes)
    _check_tensors(name, q, k_cache, v_cache)
    if k_cache.stride() != v_cache.stride():
        refuse(
            name, "v_cache", f"strides {v_cache.stride()}", f"needs k_cache's {k_cache.stride()}"
        )
    batch, query_len = q.shape[:2]
    if block_table is None:
        # A dense cache is a paged one with a page per row.
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        block_table = rows.int()[:, None]
    if (k is None) != (v is None):
        refuse(name, "k" if v is None else "v", "tensor", "stores k and v together; pass both")
    if k is not None and cache_seqlens is None:
        refuse(name, "cache_seqlens", None, "stores k and v behind the cached tokens; pass it")
    capacity = block_table.shape[1] * k_cache.shape[1]
    room = capacity - (0 if k is None else k.shape[1])
    if isinstance(cache_seqlens, int) and cache_seqlens > room:
        refuse(name, "cache_seqlens", cache_seqlens, f"has room for {room} here")
    if isinstance(cache_seqlens, Tensor):
        lens = cache_seqlens.int()
    else:
        length = capacity if cache_seqlens is None else cache_seqlens
        lens = torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
    if k is not None and v is not None:
        append_to_cache(k, v, k_cache, v_cache, lens, block_table)
        lens = lens + k.shape[1]
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        lens,
        block_table,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        left,
        right,
        softcap,
        num_splits == 0,
        return_softmax_lse,
    )
    if not return_softmax_lse:
        return out
    return out, lse.view(-1, batch, query_len).transpose(0, 1)


def _masking(
    function: str,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> tuple[int, int]:
    """The window (left, right), -1 for no bound; the causal mask is a right edge of 0."""
    if softcap < 0.0:
        refuse(function, "softcap", softcap, "caps scores at a positive number; pass 0.0 for none")
    if alibi_slopes is not None:
        refuse(function, "alibi_slopes", "tensor", "has no ALiBi; pass None")
    left, right = window_size
    return (left if left >= 0 else -1, 0 if causal else right if right >= 0 else -1)


def _check_tensors(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes and types that the kernels were not written for."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        refuse(
            function,
            "q, k, v",
            "a tensor that requires grad",
            "is forward only; call it under torch.no_grad(), or train with "
            "nanovllm_attention_sdpa.compat.flash_attn_varlen_func",
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        refuse(function, "q, k, v", found, f"needs one dtype of {', '.join(map(str, DTYPES))}")
    if q.shape[-1] not in HEAD_SIZES:
        refuse(function, "q", f"head size {q.shape[-1]}", f"has head sizes {HEAD_SIZES}")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        found = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        refuse(function, "q, k, v", found, "needs one head size, and k like v")
    if q.shape[-2] % k.shape[-2]:
        found = f"{q.shape[-2]} query and {k.shape[-2]} KV heads"
        refuse(function, "q", found, "needs a whole number of query heads per KV head")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        refuse(function, "k, v", f"strides {k.stride()}", "needs a contiguous head dimension")
