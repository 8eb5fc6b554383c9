"""The custom operators behind `compat`: opaque to torch.compile, with shapes it can know.

Each has a fake kernel, which says what comes out without running anything, and the packed one has a
gradient, itself an operator, so that training compiles too. Operators are called with all of their
arguments by place, so a fake kernel names those that it needs; `with_lse` is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_sdpa.dense import Rules, attend, attend_backward, attend_fused
from nanovllm_attention_sdpa.rotary import rotate
from nanovllm_core.api import UnsupportedError

NAMESPACE = __name__.partition(".")[0]


def refusal(function: str, parameter: str, value: object, reason: str) -> UnsupportedError:
    """An error that names a function's parameter, its value and the reason."""
    return UnsupportedError(f"{function}: {parameter}={value} is not supported: {reason}")


@torch.library.custom_op(f"{NAMESPACE}::attend_packed", mutates_args=())
def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    block_table: Tensor | None,
    slopes: Tensor | None,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Packed queries to packed keys [total, K, D] or pages: out [T, H, D], LSE [H, T] or [0]."""
    name = "flash_attn_varlen_func"
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    _check_longest(name, "max_seqlen_q", max_query_len, bounds_q)
    _check_longest(name, "max_seqlen_k", max_key_len, bounds_k)
    rules = Rules(scale, (left, right), soft_cap)
    out, lse = _outputs(q, (q.shape[1], q.shape[0]), with_lse)
    for row, (queries, keys) in enumerate(zip(_slices(bounds_q), _slices(bounds_k), strict=True)):
        if block_table is None:
            k_LKD, v_LKD = k[keys], v[keys]
        else:
            k_LKD, v_LKD = (_pages(x, block_table[row], keys.stop - keys.start) for x in (k, v))
        here = _slopes_of(slopes, row)
        if soft_cap > 0 or with_lse:
            out[queries], row_lse = attend(q[queries], k_LKD, v_LKD, rules, here)
            if with_lse:
                lse[:, queries] = row_lse
        else:
            out[queries] = attend_fused(q[queries], k_LKD, v_LKD, rules, here)
    return out, lse


@attend_packed.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, (q.shape[1], q.shape[0]), with_lse=others[-1])


@torch.library.custom_op(f"{NAMESPACE}::attend_packed_backward", mutates_args=())
def attend_packed_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `attend_packed` without pages, in their shapes."""
    rules = Rules(scale, (left, right), soft_cap)
    # A key of no sequence has no gradient.
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = zip(_slices(starts_q.tolist()), _slices(starts_k.tolist()), strict=True)
    for row, (queries, keys) in enumerate(rows):
        dq[queries], dk[keys], dv[keys] = attend_backward(
            grad[queries],
            None if grad_lse is None else grad_lse[:, queries],
            q[queries],
            k[keys],
            v[keys],
            rules,
            _slopes_of(slopes, row),
        )
    return dq, dk, dv


@attend_packed_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, _, slopes, _, _, scale, left, right, soft_cap, with_lse = inputs
    ctx.save_for_backward(q, k, v, starts_q, starts_k, slopes)
    ctx.rules, ctx.with_lse = (scale, left, right, soft_cap), with_lse


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = attend_packed_backward(
        grad, grad_lse if ctx.with_lse else None, *ctx.saved_tensors, *ctx.rules
    )
    return (*grads, *[None] * 11)


attend_packed.register_autograd(_backward, setup_context=_remember)


@torch.library.custom_op(f"{NAMESPACE}::attend_cache", mutates_args=("k_cache", "v_cache"))
def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    seq_lens: Tensor,
    batch_idx: Tensor | None,
    block_table: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    interleaved: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Append, then attend: out [B, Q, H, D], LSE [B, H, Q] or [0]."""
    lens: list[int] = seq_lens.tolist()
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if max(lens, default=0) > capacity:
        raise refusal(
            "flash_attn_with_kvcache",
            "cache_seqlens",
            max(lens),
            f"the cache holds {capacity} a row",
        )
    rows: Sequence[int] = range(q.shape[0]) if batch_idx is None else batch_idx.tolist()
    rules = Rules(scale, (left, right), soft_cap)
    out, lse = _outputs(q, (q.shape[0], q.shape[2], q.shape[1]), with_lse)
    if k is not None and v is not None:
        if cos is not None and sin is not None:
            local = rules.window != (-1, -1)
            q = rotate(q, cos, sin, lens, interleaved, advance=local)
            k = rotate(k, cos, sin, lens, interleaved, advance=True)
        _append("flash_attn_with_kvcache", (k, v), (k_cache, v_cache), lens, rows, block_table)
        lens = [length + k.shape[1] for length in lens]
    for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
        if block_table is None:
            k_LKD, v_LKD = k_cache[row, :length], v_cache[row, :length]
        else:
            k_LKD, v_LKD = (_pages(x, block_table[index], length) for x in (k_cache, v_cache))
        here = _slopes_of(slopes, index)
        if soft_cap > 0 or with_lse:
            out[index], row_lse = attend(q[index], k_LKD, v_LKD, rules, here)
            if with_lse:
                lse[index] = row_lse
        else:
            out[index] = attend_fused(q[index], k_LKD, v_LKD, rules, here)
    return out, lse


@attend_cache.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, (q.shape[0], q.shape[2], q.shape[1]), with_lse=others[-1])


def _outputs(q: Tensor, lse_shape: tuple[int, ...], with_lse: bool) -> tuple[Tensor, Tensor]:
    """New tensors: the output like q, contiguous, and the LSE, empty where nobody asked for it."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape = lse_shape if with_lse else (0,)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(shape, dtype=dtype, device=q.device),
    )


def _slices(starts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _slopes_of(alibi_slopes: Tensor | None, row: int) -> Tensor | None:
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[row]


def _pages(cache: Tensor, table_M: Tensor, num_keys: int) -> Tensor:
    """The first `num_keys` keys [L, K, D] of the pages that one row of a block table names."""
    num_pages = -(-num_keys // cache.shape[1])
    return cache.index_select(0, table_M[:num_pages]).flatten(0, 1)[:num_keys]


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
            raise refusal(
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
        raise refusal(
            name, parameter, given, f"a sequence has {longest}; pass the longest length or more"
        )
