"""flash-attn 2's two functions for inference, by its own signatures, on torch's SDPA.

Code written for flash-attn runs by changing an import:

    from nanovllm_attention_sdpa.compat import flash_attn_varlen_func, flash_attn_with_kvcache

Signatures and meanings: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention. Every
parameter is honoured, or refused by name with `UnsupportedError`. Sequence lengths are read on the
host: on a GPU each call synchronises. Any device, dtype, head size and page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nanovllm_attention_sdpa.dense import Rules, attend, attend_fused
from nanovllm_attention_sdpa.rotary import rotate
from nanovllm_core.api import UnsupportedError


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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed sequences.

    `q` [T, H, D]; `k`, `v` [total keys, K, D], or pages [N, P, K, D] with `block_table` [S, M]
    int32; `cu_seqlens_q`, `cu_seqlens_k` [S + 1], running sums of lengths. Causal and window masks
    are aligned to the last query and key. `alibi_slopes` [H] or [S, H].

    Returns the output [T, H, D]; with `return_attn_probs` also the LSE [H, T] in float32 and an
    empty tensor, as flash-attn does without dropout. `deterministic` concerns flash-attn's
    backward pass; this forward pass always is. Refused: `dropout_p` above 0, and maxima below a
    sequence's length.
    """
    name = "flash_attn_varlen_func"
    if dropout_p != 0.0:
        raise _refusal(name, "dropout_p", dropout_p, "it has no dropout; pass dropout_p=0.0")
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    _check_longest(name, "max_seqlen_q", max_seqlen_q, starts_q)
    _check_longest(name, "max_seqlen_k", max_seqlen_k, starts_k)
    rules = _rules(q, softmax_scale, causal, window_size, softcap)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for row in range(len(starts_q) - 1):
        queries = slice(starts_q[row], starts_q[row + 1])
        keys = slice(starts_k[row], starts_k[row + 1])
        if block_table is None:
            k_LKD, v_LKD = k[keys], v[keys]
        else:
            k_LKD, v_LKD = (_pages(x, block_table[row], keys.stop - keys.start) for x in (k, v))
        slopes = _slopes_of(alibi_slopes, row)
        if rules.soft_cap > 0 or return_attn_probs:
            out[queries], lse[:, queries] = attend(q[queries], k_LKD, v_LKD, rules, slopes)
        else:
            out[queries] = attend_fused(q[queries], k_LKD, v_LKD, rules, slopes)
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
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a KV cache, to which `k` and `v` are first appended in place.

    `q` [B, Q, H, D]; `k_cache`, `v_cache` [B', L, K, D], or pages [N, P, K, D] with `block_table`
    [B, M] int32; `k`, `v` [B, new, K, D] go to positions `cache_seqlens` and on, which are the keys
    already there (without it all of the cache is). `rotary_cos`, `rotary_sin` [positions, R / 2]
    rotate the new keys, and the queries: each at its own position if the mask is causal or a
    window, else all at `cache_seqlens`. `cache_batch_idx` [B] names each row's cache.

    Returns the output [B, Q, H, D]; with `return_softmax_lse` also the LSE [B, H, Q] in float32.
    `num_splits` is a hint for speed, which changes no result. Refused: `cache_leftpad`; rotary
    tables or `v` without `k`; `k` without `cache_seqlens`; `cache_batch_idx` with `block_table`;
    keys appended beyond the cache.
    """
    name = "flash_attn_with_kvcache"
    del num_splits
    if cache_leftpad is not None:
        raise _refusal(
            name, "cache_leftpad", "a tensor", "keys start at 0; pass None and shift the cache"
        )
    if cache_batch_idx is not None and block_table is not None:
        raise _refusal(
            name, "cache_batch_idx", "a tensor", "pages are named by block_table alone; pass None"
        )
    lens = _cache_lens(q, k_cache, cache_seqlens, block_table)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if max(lens, default=0) > capacity:
        raise _refusal(name, "cache_seqlens", max(lens), f"the cache holds {capacity} a row")
    rows = range(q.shape[0]) if cache_batch_idx is None else cache_batch_idx.tolist()
    rules = _rules(q, softmax_scale, causal, window_size, softcap)
    if (rotary_cos is None) != (rotary_sin is None):
        raise _refusal(name, "rotary_cos", "alone", "pass rotary_cos and rotary_sin together")
    if (k is None) != (v is None):
        raise _refusal(name, "k", "alone", "pass k and v together")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise _refusal(name, "cache_seqlens", None, "it says where k and v go; pass it")
        if rotary_cos is not None and rotary_sin is not None:
            local = rules.window != (-1, -1)
            q = rotate(q, rotary_cos, rotary_sin, lens, rotary_interleaved, advance=local)
            k = rotate(k, rotary_cos, rotary_sin, lens, rotary_interleaved, advance=True)
        _append(name, (k, v), (k_cache, v_cache), lens, rows, block_table)
        lens = [length + k.shape[1] for length in lens]
    elif rotary_cos is not None:
        raise _refusal(name, "rotary_cos", "a tensor", "it rotates new keys only; pass k and v")
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
        if block_table is None:
            k_LKD, v_LKD = k_cache[row, :length], v_cache[row, :length]
        else:
            k_LKD, v_LKD = (_pages(x, block_table[index], length) for x in (k_cache, v_cache))
        slopes = _slopes_of(alibi_slopes, index)
        if rules.soft_cap > 0 or return_softmax_lse:
            out[index], lse[index] = attend(q[index], k_LKD, v_LKD, rules, slopes)
        else:
            out[index] = attend_fused(q[index], k_LKD, v_LKD, rules, slopes)
    return (out, lse) if return_softmax_lse else out


def _rules(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
) -> Rules:
    left, right = window_size
    return Rules(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        window=(left if left >= 0 else -1, 0 if causal else right if right >= 0 else -1),
        soft_cap=softcap,
    )


def _slopes_of(alibi_slopes: Tensor | None, row: int) -> Tensor | None:
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[row]


def _pages(cache: Tensor, table_M: Tensor, num_keys: int) -> Tensor:
    """The first `num_keys` keys [L, K, D] of the pages that one row of a block table names."""
    num_pages = -(-num_keys // cache.shape[1])
    return cache.index_select(0, table_M[:num_pages]).flatten(0, 1)[:num_keys]


def _cache_lens(
    q: Tensor, k_cache: Tensor, cache_seqlens: int | Tensor | None, block_table: Tensor | None
) -> list[int]:
    """The keys in each row's cache before any are appended."""
    if isinstance(cache_seqlens, Tensor):
        return [int(length) for length in cache_seqlens.tolist()]
    pages = 1 if block_table is None else block_table.shape[1]
    length = pages * k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    return [length] * q.shape[0]


def _append(
    name: str,
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    lens: Sequence[int],
    rows: Sequence[int],
    block_table: Tensor | None,
) -> None:
    """Write new keys and values [B, new, K, D] at positions `lens` and on."""
    count, page = new[0].shape[1], caches[0].shape[1]
    capacity = page * (1 if block_table is None else block_table.shape[1])
    for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
        if length + count > capacity:
            raise _refusal(
                name,
                "k",
                f"{count} keys after {length}",
                f"the cache of row {index} holds {capacity}; make it larger",
            )
        positions = torch.arange(length, length + count, device=caches[0].device)
        for source, cache in zip(new, caches, strict=True):
            if block_table is None:
                cache[row, positions] = source[index]
            else:
                cache[block_table[index, positions // page].long(), positions % page] = source[
                    index
                ]


def _check_longest(name: str, parameter: str, given: int, starts: Sequence[int]) -> None:
    longest = max((b - a for a, b in pairwise(starts)), default=0)
    if given < longest:
        raise _refusal(
            name, parameter, given, f"a sequence has {longest}; pass the longest length or more"
        )


def _refusal(function: str, parameter: str, value: object, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{function}: {parameter}={value} is not supported: {reason}")
