"""Shapes, dtypes and devices of arguments, which the host reads without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import refuse

INDEX_DTYPES = (torch.int32, torch.int64)


def check_varlen_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Refuse tensors that `flash_attn_varlen_func` cannot read together."""
    name = "flash_attn_varlen_func"
    _check_shape(name, "q", q, "tokens", "heads", "head size")
    packed = ("tokens", "KV heads", "head size")
    if block_table is None:
        _check(name, q, "k", k, *packed, remedy="blocks need a block_table")
    else:
        _check(name, q, "k", k, "blocks", *packed, remedy="packed keys have no block_table")
    _check_like(name, q, "v", v, k)
    _check_indices(name, q, "cu_seqlens_q", cu_seqlens_q, "sequences + 1")
    num_seqs = cu_seqlens_q.shape[0] - 1
    if num_seqs < 0:
        refuse(name, "cu_seqlens_q", cu_seqlens_q, "it needs shape [sequences + 1]; start it at 0")
    _check_indices(name, q, "cu_seqlens_k", cu_seqlens_k, num_seqs + 1)
    if block_table is not None:
        _check_indices(name, q, "block_table", block_table, num_seqs, "blocks")
    _check_heads(name, q, "k", k, num_seqs, alibi_slopes)


def check_kvcache_shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
) -> None:
    """Refuse tensors that `flash_attn_with_kvcache` cannot read together."""
    name = "flash_attn_with_kvcache"
    _check_shape(name, "q", q, "rows", "queries", "heads", "head size")
    batch = q.shape[0]
    _check(name, q, "k_cache", k_cache, "rows or blocks", "tokens", "KV heads", "head size")
    _check_like(name, q, "v_cache", v_cache, k_cache)
    if block_table is not None:
        _check_indices(name, q, "block_table", block_table, batch, "blocks")
    elif cache_batch_idx is not None:
        _check_indices(name, q, "cache_batch_idx", cache_batch_idx, batch)
    elif k_cache.shape[0] < batch:
        refuse(
            name, "k_cache", f"{k_cache.shape[0]} rows",
            f"q has {batch}; give the cache a row for each, or pass cache_batch_idx",
        )  # fmt: skip
    if isinstance(cache_seqlens, Tensor):
        # Lengths on another device are moved.
        _check_shape(name, "cache_seqlens", cache_seqlens, batch)
        _check_index_dtype(name, "cache_seqlens", cache_seqlens)
    elif isinstance(cache_seqlens, float):
        refuse(name, "cache_seqlens", cache_seqlens, "it counts tokens; pass an int")
    _check_heads(name, q, "k_cache", k_cache, batch, alibi_slopes)


def check_new_keys(
    q: Tensor,
    k_cache: Tensor,
    k: Tensor,
    v: Tensor,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
) -> None:
    """Refuse new keys and values unlike the cache, and rotary tables unlike these."""
    name, head_size = "flash_attn_with_kvcache", k_cache.shape[3]
    _check(name, q, "k", k, q.shape[0], "new tokens", *k_cache.shape[2:])
    _check_like(name, q, "v", v, k)
    for parameter, x in (("k", k), ("v", v)):
        if x.dtype != k_cache.dtype:
            refuse(name, parameter, x.dtype, f"the cache has {k_cache.dtype}; convert it")
    if rotary_cos is None or rotary_sin is None:
        return
    _check(name, q, "rotary_cos", rotary_cos, "positions", "pairs")
    _check_like(name, q, "rotary_sin", rotary_sin, rotary_cos)
    if 2 * rotary_cos.shape[1] > head_size or rotary_cos.shape[0] == 0:
        refuse(
            name, "rotary_cos", rotary_cos,
            f"heads of {head_size} elements have at most {head_size // 2} pairs to rotate, by "
            "tables of at least one position",
        )  # fmt: skip


def _check_heads(
    function: str, q: Tensor, keys: str, k: Tensor, rows: int, alibi_slopes: Tensor | None
) -> None:
    """Head sizes and counts of `q` and `k` [..., heads, head size], and a slope for each head.

    `keys` is the name of `k`.
    """
    heads, head_size = q.shape[-2:]
    kv_heads = k.shape[-2]
    if k.shape[-1] != head_size:
        refuse(function, "q", f"head size {head_size}", f"keys have {k.shape[-1]}; pass one size")
    for parameter, x in (("q", q), (keys, k)):
        if 0 in x.shape[-2:]:
            refuse(function, parameter, x, "it needs at least one head of at least one element")
    if heads % kv_heads:
        found = f"{heads} query and {kv_heads} KV heads"
        refuse(function, "q", found, "each KV head serves a whole number of query heads")
    if alibi_slopes is not None:
        _check_device(function, q, "alibi_slopes", alibi_slopes)
        if alibi_slopes.shape not in ((heads,), (rows, heads)):
            limit = f"it needs shape [{heads}] or [{rows}, {heads}]"
            refuse(function, "alibi_slopes", alibi_slopes, limit)


def _check_indices(function: str, q: Tensor, parameter: str, x: Tensor, *shape: int | str) -> None:
    _check(function, q, parameter, x, *shape)
    _check_index_dtype(function, parameter, x)


def _check_index_dtype(function: str, parameter: str, x: Tensor) -> None:
    if x.dtype not in INDEX_DTYPES:
        refuse(function, parameter, x.dtype, "it needs int32 or int64; convert it")


def _check(
    function: str, q: Tensor, parameter: str, x: Tensor, *shape: int | str, remedy: str = ""
) -> None:
    """Refuse `x` of another shape, or on another device than `q`."""
    _check_shape(function, parameter, x, *shape, remedy=remedy)
    _check_device(function, q, parameter, x)


def _check_like(function: str, q: Tensor, parameter: str, x: Tensor, like: Tensor) -> None:
    """Refuse `x` of another shape than `like`, or on another device than `q`."""
    if x.shape != like.shape:
        _refuse_shape(function, parameter, x, like.shape)
    _check_device(function, q, parameter, x)


def _check_shape(
    function: str, parameter: str, x: Tensor, *shape: int | str, remedy: str = ""
) -> None:
    """Refuse `x` of another shape; a dimension with a name has any size."""
    if x.dim() != len(shape):
        _refuse_shape(function, parameter, x, shape, remedy)
    for size, found in zip(shape, x.shape, strict=True):
        if not isinstance(size, str) and size != found:
            _refuse_shape(function, parameter, x, shape, remedy)


def _refuse_shape(
    function: str, parameter: str, x: Tensor, shape: Sequence[int | str], remedy: str = ""
) -> NoReturn:
    limit = f"it needs shape [{', '.join(map(str, shape))}]"
    refuse(function, parameter, x, f"{limit}; {remedy}" if remedy else limit)


def _check_device(function: str, q: Tensor, parameter: str, x: Tensor) -> None:
    if x.device != q.device:
        refuse(function, parameter, f"a tensor on {x.device}", f"q is on {q.device}; move it there")
