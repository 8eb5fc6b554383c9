"""The two functions: flash-attn 2's signatures, and the way from these to a backend's operators.

Signatures and meanings: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention. Every
parameter is honoured, or refused by name with UnsupportedError; none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import Backend, refuse, requires_grad
from nanovllm_flash_attn_compat.bounds import check_blocks, check_starts, host_sees
from nanovllm_flash_attn_compat.cache import KVCache
from nanovllm_flash_attn_compat.shapes import (
    check_kvcache_shapes,
    check_new_keys,
    check_varlen_shapes,
)


class FlashAttention:
    """Both functions on the backend that `choose` names for the device of q."""

    def __init__(self, choose: Callable[[torch.device], Backend]) -> None:
        self._choose = choose

    def flash_attn_varlen_func(
        self,
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
        """Attention of packed sequences of different lengths.

        `q` [T, H, D]; `k`, `v` [total keys, K, D], or blocks [N, P, K, D] with `block_table` [S, M]
        int32; `cu_seqlens_q`, `cu_seqlens_k` [S + 1] int32, running sums of lengths. Masks are
        aligned to the last query and key; `window_size` (left, right) counts the keys beside a
        query's own, -1 for no bound; `softcap` 0.0 is none; `alibi_slopes` [H] or [S, H].

        Returns out [T, H, D]; with `return_attn_probs` (out, softmax_lse [H, T] fp32, an empty
        tensor where flash-attn shows dropout's pattern). A query that sees no key gets zeros and,
        as flash-attn gives it, a log-sum-exp of +inf. The result is always `deterministic`. Lengths
        on a GPU must be within `max_seqlen_q` and `max_seqlen_k`; the host does not see them.
        Raises UnsupportedError for what the backend lacks, tensors that do not fit together, and
        wrong lengths on the host.
        """
        name = "flash_attn_varlen_func"
        backend = self._choose(q.device)
        if dropout_p != 0.0:
            refuse(name, "dropout_p", dropout_p, "there is no dropout; pass 0.0")
        backend.refuse_lacking(
            name, alibi_slopes=alibi_slopes, softmax_scale=_unusual_scale(softmax_scale)
        )
        check_varlen_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table)
        _check_tensors(name, backend, q, k, v, softcap, alibi_slopes)
        starts_q, starts_k, block_table = _check_packing(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table
        )
        out, lse = backend.packed_attention(
            q,
            k,
            v,
            starts_q,
            starts_k,
            max_seqlen_q,
            max_seqlen_k,
            block_table=block_table,
            with_lse=return_attn_probs,
            **_rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes),
        )
        return (out, _flash_lse(lse), q.new_empty(0)) if return_attn_probs else out

    def flash_attn_with_kvcache(
        self,
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
        """Attention of a few new queries per row to a cache, after storing `k` and `v` in it.

        `q` [B, Q, H, D]; the caches [rows, tokens, K, D], or blocks [N, P, K, D] with `block_table`
        [B, M] int32; `k`, `v` [B, new, K, D] go to the positions from `cache_seqlens` on, in place.
        `cache_batch_idx` [B] names each row's cache. `rotary_cos`, `rotary_sin` [positions, R / 2]
        rotate the new keys, and the queries: each at its own position if the mask is causal or a
        window, else all at `cache_seqlens`. Masks as in `flash_attn_varlen_func`; `alibi_slopes`
        [H] or [B, H].

        Returns out [B, Q, H, D], with `return_softmax_lse` also softmax_lse [B, H, Q] fp32.
        `num_splits` of 1 never splits a row's keys, 0 lets the backend choose. No gradients.
        Lengths on a GPU that leave no room in the cache are cut to what does, unless `debug()`.
        """
        name = "flash_attn_with_kvcache"
        backend = self._choose(q.device)
        _check_companions(
            k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
        )
        backend.refuse_lacking(
            name, alibi_slopes=alibi_slopes, num_splits=num_splits if num_splits > 1 else None,
            softmax_scale=_unusual_scale(softmax_scale),
        )  # fmt: skip
        check_kvcache_shapes(
            q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table, alibi_slopes
        )
        if k is not None and v is not None:
            check_new_keys(q, k_cache, k, v, rotary_cos, rotary_sin)
        _check_tensors(name, backend, q, k_cache, v_cache, softcap, alibi_slopes)
        rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
        cache = KVCache.of(
            q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table,
            num_new=0 if k is None else k.shape[1],
        )  # fmt: skip
        if k is not None and v is not None:
            if rotary_cos is not None and rotary_sin is not None:
                tables = (rotary_cos, rotary_sin, rotary_interleaved)
                q = cache.rotate(q, *tables, advance=rules["window"] != (-1, -1))
                k = cache.rotate(k, *tables, advance=True)
            cache = cache.append(k, v)
        out, lse = backend.paged_attention(
            q,
            cache.k,
            cache.v,
            cache.block_table,
            cache.lens,
            may_split=num_splits != 1,
            with_lse=return_softmax_lse,
            **rules,
        )
        return (out, _flash_lse(lse)) if return_softmax_lse else out


def _unusual_scale(softmax_scale: float | None) -> float | None:
    """A scale that is not positive, which not every backend has; else None."""
    return None if softmax_scale is None or softmax_scale > 0.0 else softmax_scale


def _rules(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The operators' keywords: what a query sees, and how scores are shaped."""
    left, right = window_size
    rules: dict[str, Any] = {
        "scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        # The causal mask is a right edge of 0.
        "window": (left if left >= 0 else -1, 0 if causal else right if right >= 0 else -1),
        "soft_cap": softcap,
    }
    if alibi_slopes is not None:
        rules["alibi_slopes"] = alibi_slopes
    return rules


def _flash_lse(lse: Tensor) -> Tensor:
    """A query that sees no key has +inf in flash-attn; the operators' -inf is its logarithm."""
    return lse.masked_fill(torch.isneginf(lse), float("inf"))


def _check_tensors(
    function: str,
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> None:
    """Refuse what no backend takes, then what this one does not."""
    if softcap < 0.0:
        refuse(function, "softcap", softcap, "it caps scores at a positive number; 0.0 is none")
    if requires_grad(alibi_slopes):
        refuse(function, "alibi_slopes", alibi_slopes, "it gets no gradient; detach() it")
    if not q.dtype == k.dtype == v.dtype:
        refuse(function, "q, k, v", f"{q.dtype}, {k.dtype}, {v.dtype}", "pass one dtype")
    backend.check(function, q, k, v)


def _check_packing(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Starts and block table of sequences that lie within q and k, as far as the host sees."""
    name, num_seqs = "flash_attn_varlen_func", cu_seqlens_q.shape[0] - 1
    starts_q = check_starts(
        cu_seqlens_q, q.shape[0], max_seqlen_q, name, "cu_seqlens_q", "raise max_seqlen_q"
    )
    if block_table is None:
        remedy = "raise max_seqlen_k"
        return starts_q, check_starts(
            cu_seqlens_k, k.shape[0], max_seqlen_k, name, "cu_seqlens_k", remedy
        ), None  # fmt: skip
    num_blocks, block_size = k.shape[:2]
    capacity = block_table.shape[1] * block_size
    starts_k = check_starts(
        cu_seqlens_k, num_seqs * capacity, min(max_seqlen_k, capacity), name, "cu_seqlens_k",
        "raise max_seqlen_k, or widen block_table",
    )  # fmt: skip
    if host_sees(block_table):
        lens = starts_k.diff()
        block_table = check_blocks(block_table, lens, block_size, num_blocks, name, "block_table")
    return starts_q, starts_k, block_table


def _check_companions(
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Refuse parameters of `flash_attn_with_kvcache` that lack another one, or exclude it."""
    name = "flash_attn_with_kvcache"
    if cache_leftpad is not None:
        refuse(name, "cache_leftpad", cache_leftpad, "every row starts at token 0; pass None")
    if block_table is not None and cache_batch_idx is not None:
        refuse(name, "cache_batch_idx", cache_batch_idx, "pass it or block_table, not both")
    for one, other, names in ((k, v, "kv"), (rotary_cos, rotary_sin, ("rotary_cos", "rotary_sin"))):
        if (one is None) != (other is None):
            given = one if other is None else other
            refuse(name, names[one is None], given, f"pass {names[0]} and {names[1]} together")
    if k is not None and cache_seqlens is None:
        refuse(name, "cache_seqlens", None, "it says where k and v go; pass it")
    if k is None and rotary_cos is not None:
        refuse(name, "rotary_cos", rotary_cos, "it rotates new keys only; pass k and v")
    if requires_grad(k, v):
        refuse(name, "k, v", "a tensor that requires grad", "a cache gets no gradient; call it "
               "under torch.no_grad()")  # fmt: skip
