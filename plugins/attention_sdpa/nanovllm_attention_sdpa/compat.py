"""flash-attn 2's two functions for inference, by its own signatures, on torch's SDPA.

Code written for flash-attn runs by changing an import:

    from nanovllm_attention_sdpa.compat import flash_attn_varlen_func, flash_attn_with_kvcache

Signatures and meanings: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention. Every
parameter is honoured, or refused by name with `UnsupportedError`. Sequence lengths are read on the
host: on a GPU each call synchronises. Any device, dtype, head size and page size.

Both functions compile whole, for their work is done by the custom operators of `compat_ops`:
`torch.compile(..., fullgraph=True)`. `flash_attn_varlen_func` has gradients of q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm_attention_sdpa.compat_ops import attend_cache, attend_packed, refusal

REQUIRES_GRAD = "a tensor that requires grad"


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
    backward pass; both passes here always are. Refused: `dropout_p` above 0, maxima below a
    sequence's length, and gradients of pages and of `alibi_slopes`.
    """
    name = "flash_attn_varlen_func"
    if dropout_p != 0.0:
        raise refusal(name, "dropout_p", dropout_p, "it has no dropout; pass dropout_p=0.0")
    if torch.is_grad_enabled():
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            raise refusal(
                name, "alibi_slopes", REQUIRES_GRAD, "they get no gradient; detach() them"
            )
        if block_table is not None and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise refusal(
                name, "block_table", "a tensor", "pages get no gradient; pass packed k and v, or "
                "call it under torch.no_grad()",
            )  # fmt: skip
    left, right = _window(causal, window_size)
    out, lse = attend_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        alibi_slopes,
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
    `num_splits` is a hint for speed, which changes no result. Refused: `cache_leftpad`; inputs that
    require a gradient, which flash-attn's function does not give either; rotary
    tables or `v` without `k`; `k` without `cache_seqlens`; `cache_batch_idx` with `block_table`;
    keys appended beyond the cache.
    """
    name = "flash_attn_with_kvcache"
    del num_splits
    if cache_leftpad is not None:
        raise refusal(
            name, "cache_leftpad", "a tensor", "keys start at 0; pass None and shift the cache"
        )
    if cache_batch_idx is not None and block_table is not None:
        raise refusal(
            name, "cache_batch_idx", "a tensor", "pages are named by block_table alone; pass None"
        )
    if (rotary_cos is None) != (rotary_sin is None):
        raise refusal(name, "rotary_cos", "alone", "pass rotary_cos and rotary_sin together")
    if (k is None) != (v is None):
        raise refusal(name, "k", "alone", "pass k and v together")
    if k is not None and cache_seqlens is None:
        raise refusal(name, "cache_seqlens", None, "it says where k and v go; pass it")
    if k is None and rotary_cos is not None:
        raise refusal(name, "rotary_cos", "a tensor", "it rotates new keys only; pass k and v")
    if torch.is_grad_enabled():
        inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
        for parameter, x in inputs.items():
            if x is not None and x.requires_grad:
                raise refusal(
                    name, parameter, REQUIRES_GRAD, "caches are for inference; call it under "
                    "torch.no_grad(), or use flash_attn_varlen_func",
                )  # fmt: skip
    lens = cache_seqlens
    if not isinstance(lens, Tensor):
        pages = 1 if block_table is None else block_table.shape[1]
        length = pages * k_cache.shape[1] if lens is None else lens
        lens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    left, right = _window(causal, window_size)
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        lens,
        cache_batch_idx,
        block_table,
        alibi_slopes,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        left,
        right,
        softcap,
        rotary_interleaved,
        return_softmax_lse,
    )
    return (out, lse) if return_softmax_lse else out


def _window(causal: bool, window_size: Sequence[int]) -> tuple[int, int]:
    """(left, right), -1 for no bound; the causal mask is a right edge of 0."""
    left, right = window_size
    return (left if left >= 0 else -1, 0 if causal else right if right >= 0 else -1)
