"""Packed and paged attention as functions, for code that has no engine.

    from nanovllm_attention_sdpa.operators import packed_attention, paged_attention

nanovllm-attention-triton has the same two, with the same signatures but for `alibi_slopes`. Both
are custom operators, so that code that calls them compiles whole: `torch.compile(...,
fullgraph=True)`. `packed_attention` without blocks has gradients of q, k and v.

Tensors are of one floating dtype on one device; heads have any size; each KV head serves a whole
number of query heads; blocks hold any number of tokens. A length beyond what its block table or its
tensor holds is cut to that, so nothing is read outside; block ids in use must name blocks that
exist. Lengths are read on the host, and a call whose lengths lie on a GPU waits for it. The
exception is `paged_attention` of single queries on a GPU, which reads nothing on the host and can
be captured.

Masks are aligned to the last query and key. `window` (left, right) counts the keys that a query
sees beside its own, -1 for no bound: (-1, 0) is the causal mask. `soft_cap` c above 0 turns scaled
scores s into c * tanh(s / c). `alibi_slopes` [H] or [S, H] take slope * distance off the scores. A
query that sees no key gets zeros and a log-sum-exp of -inf.

Shape suffixes as in `nanovllm_core.interfaces.attention`; S sequences, L keys of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanovllm_attention_sdpa.dense import (
    Rules,
    attend,
    attend_backward,
    attend_fused,
    wide_dtype,
)
from nanovllm_attention_sdpa.single import attend_single
from nanovllm_core.api import UnsupportedError

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
    alibi_slopes: Tensor | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences of different lengths.

    `k`, `v` [L, K, D], or blocks [N, P, K, D] with `block_table` [S, M] int32. `query_starts`,
    `key_starts` [S + 1] int32: running sums of lengths, of which none is above `max_query_len` and
    `max_key_len`. Returns out [T, H, D] and lse [H, T] in float32 at least, or [0] unless
    `with_lse`. Raises UnsupportedError where blocks would need gradients.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THD, k, v))
    if needs_grad and block_table is not None:
        raise UnsupportedError(
            "packed_attention: block_table with q, k or v that requires grad is not supported: "
            "blocks get no gradient; pass packed k and v, or call it under torch.no_grad()"
        )
    left, right = window
    out, lse = _packed(
        q_THD, k, v, query_starts, key_starts, block_table, alibi_slopes, scale, left, right,
        soft_cap, with_lse,
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
    alibi_slopes: Tensor | None = None,
    may_split: bool = True,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the last Q tokens of each row to the blocks that its block table names.

    `block_table` [B, M] and `seq_lens` [B] int32; a row's length counts its queries. `may_split`
    False: no row's keys are divided among programs, which torch decides by itself here. Returns
    out [B, Q, H, D] and lse [B, H, Q] in float32 at least, or [0] unless `with_lse`.
    """
    batch, query_len = q_BQHD.shape[:2]
    left, right = window
    out, lse = _paged(
        q_BQHD, k_NPKD, v_NPKD, block_table, seq_lens, alibi_slopes, scale, left, right, soft_cap,
        with_lse,
    )  # fmt: skip
    return out, lse.view(-1, batch, query_len).transpose(0, 1) if with_lse else lse


# The operators are called with all of their arguments by place; `with_lse` is the last.


@torch.library.custom_op(f"{NAMESPACE}::packed_attention", mutates_args=())
def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    block_table: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    rules = Rules(scale, (left, right), soft_cap)
    keys = _slices(starts_k)
    if block_table is None:
        sequences: Iterable[tuple[Tensor, Tensor]] = ((k[part], v[part]) for part in keys)
    else:
        sequences = _gather(k, v, block_table, [part.stop - part.start for part in keys])
    return _attend(q, _slices(starts_q), sequences, rules, slopes, with_lse)


@_packed.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, with_lse=others[-1])


@torch.library.custom_op(f"{NAMESPACE}::packed_attention_backward", mutates_args=())
def _packed_backward(
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
    """Gradients of q, k and v of `_packed` without blocks, in their shapes."""
    rules = Rules(scale, (left, right), soft_cap)
    # A key of no sequence has no gradient.
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = zip(_slices(starts_q), _slices(starts_k), strict=True)
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


@_packed_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, _, slopes, scale, left, right, soft_cap, with_lse = inputs
    ctx.save_for_backward(q, k, v, starts_q, starts_k, slopes)
    ctx.rules, ctx.with_lse = (scale, left, right, soft_cap), with_lse


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _packed_backward(
        grad, grad_lse if ctx.with_lse else None, *ctx.saved_tensors, *ctx.rules
    )
    return (*grads, *[None] * 9)


_packed.register_autograd(_backward, setup_context=_remember)


@torch.library.custom_op(f"{NAMESPACE}::paged_attention", mutates_args=())
def _paged(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    soft_cap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    rules = Rules(scale, (left, right), soft_cap)
    if q.shape[1] == 1 and q.is_cuda:
        out, lse = attend_single(q[:, 0], k_blocks, v_blocks, block_table, seq_lens, rules, slopes)
        return out[:, None], lse if with_lse else lse.new_empty(0)
    batch, query_len = q.shape[:2]
    queries = [slice(row * query_len, (row + 1) * query_len) for row in range(batch)]
    sequences = _gather(k_blocks, v_blocks, block_table, seq_lens.tolist())
    out, lse = _attend(q.flatten(0, 1), queries, sequences, rules, slopes, with_lse)
    return out.view(q.shape), lse


@_paged.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, with_lse=others[-1])


def _attend(
    q_THD: Tensor,
    queries: list[slice],
    sequences: Iterable[tuple[Tensor, Tensor]],
    rules: Rules,
    slopes: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend the `queries` of each sequence to its keys and values [L, K, D]."""
    out, lse = _outputs(q_THD, with_lse)
    for row, (part, (k_LKD, v_LKD)) in enumerate(zip(queries, sequences, strict=True)):
        row_slopes = _slopes_of(slopes, row)
        if with_lse:
            out[part], lse[:, part] = attend(q_THD[part], k_LKD, v_LKD, rules, row_slopes)
        elif rules.soft_cap > 0:
            out[part], _ = attend(q_THD[part], k_LKD, v_LKD, rules, row_slopes)
        else:
            out[part] = attend_fused(q_THD[part], k_LKD, v_LKD, rules, row_slopes)
    return out, lse


def _outputs(q: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    """New tensors: the output like q [..., H, D], contiguous; the LSE [H, queries], or [0]."""
    shape = (q.shape[-2], math.prod(q.shape[:-2])) if with_lse else (0,)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(shape, dtype=wide_dtype(q), device=q.device),
    )


def _slices(starts: Tensor) -> list[slice]:
    """Where each sequence's tokens lie, from the running sums of their lengths."""
    return [slice(start, stop) for start, stop in pairwise(starts.tolist())]


def _slopes_of(alibi_slopes: Tensor | None, row: int) -> Tensor | None:
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[row]


def _gather(
    k_NPKD: Tensor, v_NPKD: Tensor, block_table: Tensor, lens: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first keys and values [L, K, D] of the blocks that each row of a block table names."""
    for table_M, length in zip(block_table, lens, strict=True):
        used_M = table_M[: -(-length // k_NPKD.shape[1])]
        k, v = (x[:, :length].index_select(0, used_M) for x in (k_NPKD, v_NPKD))
        yield k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]
