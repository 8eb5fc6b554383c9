"""flash-attn's two paged entry points, with flash-attn 2's own signatures, on these kernels.

Code written for flash-attn runs by changing its import:

    from nanovllm_attention_triton.compat import flash_attn_varlen_func, flash_attn_with_kvcache

Every parameter is honoured or refused by its name; nothing is ignored. Forward only. K and V pages
may hold any number of tokens. A query that sees no key gets zeros and a log-sum-exp of -inf.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm_attention_triton.decode import DecodeShape, DecodeWorkspace, num_multiprocessors
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill import fits_large_tiles, prefill_attention
from nanovllm_attention_triton.tuning import decode_tuning, prefill_tuning
from nanovllm_core.api import UnsupportedError

HEAD_SIZES = (64, 128)
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
    int32; `cu_seqlens_q`, `cu_seqlens_k` [S + 1] int32. Returns out [T, H, D]; with
    `return_attn_probs` (out, softmax_lse [H, T] fp32, an empty tensor where flash-attn shows
    dropout's pattern). The result is always `deterministic`. Lengths that lie on a GPU are not
    compared with `max_seqlen_q` and `max_seqlen_k`, which would wait for them. Raises
    UnsupportedError for what the kernels cannot do.
    """
    name = "flash_attn_varlen_func"
    if dropout_p != 0.0:
        _refuse(name, "dropout_p", dropout_p, "has no dropout; pass 0.0")
    causal = _masking(name, causal, window_size, softcap, alibi_slopes)
    _check_tensors(name, q, k, v)
    lens = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).int()
    _check_lens(name, "cu_seqlens_k", lens, max_seqlen_k)
    _check_lens(name, "cu_seqlens_q", cu_seqlens_q[1:] - cu_seqlens_q[:-1], max_seqlen_q)
    if block_table is None:
        # Packed keys are a cache whose pages hold one token each.
        k, v = k.contiguous()[:, None], v.contiguous()[:, None]
        steps = torch.arange(max(max_seqlen_k, 1), dtype=torch.int32, device=q.device)
        block_table = cu_seqlens_k[:-1, None].int() + steps
    out, lse = _prefill(
        name,
        q,
        k,
        v,
        block_table,
        lens,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        causal,
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
            _refuse(name, parameter, "tensor", "does not rotate; rotate q and k before the call")
    if cache_leftpad is not None:
        _refuse(name, "cache_leftpad", "tensor", "starts every row at token 0; pass None")
    if num_splits not in (0, 1):
        _refuse(
            name, "num_splits", num_splits, "splits by measured constants; pass 0, or 1 for none"
        )
    if block_table is not None and cache_batch_idx is not None:
        _refuse(name, "cache_batch_idx", "tensor", "takes it or block_table, not both")
    causal = _masking(name, causal, window_size, softcap, alibi_slopes)
    _check_tensors(name, q, k_cache, v_cache)
    if k_cache.stride() != v_cache.stride():
        _refuse(
            name, "v_cache", f"strides {v_cache.stride()}", f"needs k_cache's {k_cache.stride()}"
        )
    batch, query_len = q.shape[:2]
    if block_table is None:
        # A dense cache is a paged one with a page per row.
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        block_table = rows.int()[:, None]
    if (k is None) != (v is None):
        _refuse(name, "k" if v is None else "v", "tensor", "stores k and v together; pass both")
    if k is not None and cache_seqlens is None:
        _refuse(name, "cache_seqlens", None, "stores k and v behind the cached tokens; pass it")
    lens = _cache_lens(cache_seqlens, k_cache, batch, block_table)
    capacity = block_table.shape[1] * k_cache.shape[1] - (0 if k is None else k.shape[1])
    known = torch.tensor([cache_seqlens]) if isinstance(cache_seqlens, int) else lens
    _check_lens(name, "cache_seqlens", known, capacity)
    if k is not None and v is not None:
        _append(k, v, k_cache, v_cache, lens, block_table)
        lens = lens + k.shape[1]
    if query_len == 1 and num_splits == 0 and not return_softmax_lse:
        return _decode(q, k_cache, v_cache, block_table, lens, softmax_scale)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * query_len
    out, lse = _prefill(
        name,
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        lens,
        starts,
        query_len,
        softmax_scale,
        causal,
        return_softmax_lse,
    )
    out = out.view(q.shape)
    if not return_softmax_lse:
        return out
    assert lse is not None  # _prefill was asked for it
    return out, lse.view(-1, batch, query_len).transpose(0, 1)


def _refuse(function: str, parameter: str, value: object, reason: str) -> NoReturn:
    raise UnsupportedError(f"{function}({parameter}={value}): attention_triton {reason}")


def _masking(
    function: str,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> bool:
    """Whether the mask is causal; refuses what would change the scores otherwise."""
    if softcap != 0.0:
        _refuse(function, "softcap", softcap, "has no soft cap; pass 0.0")
    if alibi_slopes is not None:
        _refuse(function, "alibi_slopes", "tensor", "has no ALiBi; pass None")
    left, right = window_size
    if left >= 0 or right > 0:
        _refuse(function, "window_size", window_size, "has no sliding window; pass (-1, -1)")
    # flash-attn reads a right edge of 0 as the causal mask.
    return causal or right == 0


def _check_tensors(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes and types that the kernels were not written for."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        _refuse(
            function, "q", "a tensor that requires grad", "is forward only; use torch.no_grad()"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        _refuse(function, "q, k, v", found, f"needs one dtype of {', '.join(map(str, DTYPES))}")
    if q.shape[-1] not in HEAD_SIZES:
        _refuse(function, "q", f"head size {q.shape[-1]}", f"has head sizes {HEAD_SIZES}")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        found = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        _refuse(function, "q, k, v", found, "needs one head size, and k like v")
    if q.shape[-2] % k.shape[-2]:
        found = f"{q.shape[-2]} query and {k.shape[-2]} KV heads"
        _refuse(function, "q", found, "needs a whole number of query heads per KV head")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        _refuse(function, "k, v", f"strides {k.stride()}", "needs a contiguous head dimension")


def _cache_lens(
    cache_seqlens: int | Tensor | None, k_cache: Tensor, batch: int, block_table: Tensor
) -> Tensor:
    """Tokens in each row's cache, int32 [B]; None means that every row is full."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens.int().contiguous()
    full = block_table.shape[1] * k_cache.shape[1]
    length = full if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)


def _check_lens(function: str, parameter: str, lens: Tensor, limit: int) -> None:
    """Refuse lengths beyond `limit`, where looking at them does not wait for a GPU."""
    if lens.device.type == "cpu" and lens.numel() and int(lens.max()) > limit:
        _refuse(function, parameter, int(lens.max()), f"has room for {limit} here")


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, block_table: Tensor
) -> None:
    """Store `k` and `v` [B, new, K, D] behind each row's `lens` tokens, in place."""
    page = k_cache.shape[1]
    positions = lens.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    pages = block_table.long().gather(1, positions // page)
    k_cache[pages, positions % page] = k
    v_cache[pages, positions % page] = v


def _prefill(
    function: str,
    q_THD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    softmax_scale: float | None,
    causal: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the prefill kernel into new tensors."""
    if k_pages.stride() != v_pages.stride():
        _refuse(function, "v", f"strides {v_pages.stride()}", f"needs k's {k_pages.stride()}")
    q_THD = q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()
    tokens, heads, head_size = q_THD.shape
    out = torch.empty((tokens, heads, head_size), dtype=q_THD.dtype, device=q_THD.device)
    lse = None
    if with_lse:
        lse = torch.empty((heads, tokens), dtype=torch.float32, device=q_THD.device)
    prefill_attention(
        q_THD,
        k_pages,
        v_pages,
        block_table.int().contiguous(),
        lens,
        query_starts.int().contiguous(),
        max_query_len,
        head_size**-0.5 if softmax_scale is None else softmax_scale,
        out,
        prefill_tuning(q_THD.element_size(), fits_large_tiles(k_pages, v_pages), TritonOptions()),
        causal=causal,
        lse_HT=lse,
    )
    return out, lse


def _decode(
    q_BQHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lens: Tensor,
    softmax_scale: float | None,
) -> Tensor:
    """Run the decode kernels for one query per row, with a workspace made for the call."""
    batch, _, num_heads, head_size = q_BQHD.shape
    capacity = block_table.shape[1] * k_pages.shape[1]
    shape = DecodeShape(
        num_heads=num_heads,
        num_kv_heads=k_pages.shape[2],
        head_size=head_size,
        max_num_seqs=batch,
        max_seq_len=capacity,
        num_multiprocessors=num_multiprocessors(q_BQHD.device),
    )
    tuning = decode_tuning(q_BQHD.element_size(), batch, TritonOptions())
    workspace = DecodeWorkspace(shape, tuning, q_BQHD.device)
    block_table = block_table.int().contiguous()
    workspace.plan(lens, block_table, k_pages.shape[1])
    q_BHD = q_BQHD[:, 0]
    q_BHD = q_BHD if q_BHD.stride(-1) == 1 else q_BHD.contiguous()
    out = torch.empty((batch, num_heads, head_size), dtype=q_BHD.dtype, device=q_BHD.device)
    scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    workspace.run(q_BHD, k_pages, v_pages, block_table, capacity, scale, out)
    return out[:, None]
