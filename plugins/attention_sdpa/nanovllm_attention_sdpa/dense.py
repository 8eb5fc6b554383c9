"""Attention of one sequence with flash-attn's masks: causal, window, soft cap, ALiBi, LSE.

Shape suffixes: Q queries, L keys, H query heads, K KV heads, G query heads per KV head, D head
size. Position of query i among the keys: i + L - Q, so that the last query meets the last key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_attention_sdpa.workspace import queries_per_slice


@dataclass(frozen=True, slots=True)
class Rules:
    """What a query sees, and how scores are shaped.

    `window` (left, right) keys around a query's position, -1 for no bound; `soft_cap` 0 for none.
    """

    scale: float
    window: tuple[int, int] = (-1, -1)
    soft_cap: float = 0.0


def attend(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, rules: Rules, slopes_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [Q, H, D] and the log of the softmax's denominator [H, Q] in float32 at least.

    A query that sees no key gives zeros, and an LSE of -inf.
    """
    num_queries, num_heads, _ = q_QHD.shape
    out = torch.empty(
        num_queries, num_heads, v_LKD.shape[-1], dtype=q_QHD.dtype, device=q_QHD.device
    )
    lse = torch.empty(num_heads, num_queries, dtype=wide_dtype(q_QHD), device=q_QHD.device)
    step = queries_per_slice(k_LKD.shape[0], 4 * 4 * num_heads)
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        bias = _bias(part, num_queries, k_LKD, rules, slopes_H)
        out[part], lse[:, part] = _attend_part(q_QHD[part], k_LKD, v_LKD, bias, rules)
    return out, lse


def attend_fused(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, rules: Rules, slopes_H: Tensor | None
) -> Tensor:
    """The same output through torch's fused kernels, which know no soft cap and give no LSE."""
    num_queries, num_heads, _ = q_QHD.shape
    group = num_heads // k_LKD.shape[1]
    q_HQD = q_QHD.transpose(0, 1)[None]
    k_HLD, v_HLD = (
        x.transpose(0, 1)[:, None].expand(-1, group, -1, -1).flatten(0, 1)[None]
        for x in (k_LKD, v_LKD)
    )
    out = torch.empty_like(q_QHD)
    step = queries_per_slice(k_LKD.shape[0], 4 * 4 * (1 if slopes_H is None else num_heads))
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        bias = _bias(part, num_queries, k_LKD, rules, slopes_H)
        attended = scaled_dot_product_attention(
            q_HQD[:, :, part], k_HLD, v_HLD, attn_mask=bias.to(q_QHD.dtype), scale=rules.scale
        )[0].transpose(0, 1)
        blind = torch.isneginf(bias).all(-1).any(0)
        out[part] = attended.masked_fill(blind[:, None, None], 0)
    return out


def attend_backward(
    grad_QHD: Tensor,
    grad_lse_HQ: Tensor | None,
    q_QHD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    rules: Rules,
    slopes_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from those of the output and, where given, of the LSE.

    The weights are computed again, as in FlashAttention's backward pass (Dao et al. 2022), a slice
    of queries at a time.
    """
    num_queries, num_heads, _ = q_QHD.shape
    num_keys, num_kv_heads, head_size = k_LKD.shape
    wide = wide_dtype(q_QHD)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_QHD, k_LKD, v_LKD))
    step = queries_per_slice(num_keys, 4 * wide.itemsize * num_heads)
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        bias = _bias(part, num_queries, k_LKD, rules, slopes_H)
        weights_HQL, _, scores_HQL = _softmax(q_QHD[part], k_LKD, bias, rules)
        # The queries of the heads that share a KV head lie behind each other: R = G * Q rows.
        per_head = num_heads // num_kv_heads * (part.stop - part.start)
        rows, heads = (num_kv_heads, per_head, num_keys), (num_kv_heads, per_head, head_size)
        q_KRD, grad_KRD = (
            x[part].to(wide).transpose(0, 1).reshape(heads) for x in (q_QHD, grad_QHD)
        )
        k_KLD, v_KLD = (x.to(wide).transpose(0, 1) for x in (k_LKD, v_LKD))
        weights_KRL = weights_HQL.reshape(rows)
        slope_KRL = grad_KRD @ v_KLD.transpose(1, 2)
        slope_KRL -= (slope_KRL * weights_KRL).sum(-1, keepdim=True)
        if grad_lse_HQ is not None:
            slope_KRL += grad_lse_HQ[:, part].to(wide).reshape(num_kv_heads, per_head, 1)
        slope_KRL *= weights_KRL
        if rules.soft_cap > 0:
            slope_KRL *= 1 - (scores_HQL / rules.soft_cap).square_().reshape(rows)
        slope_KRL *= rules.scale
        dq_HQD = (slope_KRL @ k_KLD).reshape(num_heads, part.stop - part.start, head_size)
        dq[part] = dq_HQD.transpose(0, 1)
        dk += (slope_KRL.transpose(1, 2) @ q_KRD).transpose(0, 1)
        dv += (weights_KRL.transpose(1, 2) @ grad_KRD).transpose(0, 1)
    return dq.to(q_QHD.dtype), dk.to(k_LKD.dtype), dv.to(v_LKD.dtype)


def _attend_part(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, bias: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Plain softmax in float32 at least; `bias` [1 or H, Q, L]."""
    num_keys, num_kv_heads, _ = k_LKD.shape
    num_queries, num_heads, _ = q_QHD.shape
    weights_HQL, lse_HQ, _ = _softmax(q_QHD, k_LKD, bias, rules)
    per_head = num_heads // num_kv_heads * num_queries
    weights_KRL = weights_HQL.view(num_kv_heads, per_head, num_keys)
    v_KLD = v_LKD.to(wide_dtype(q_QHD)).transpose(0, 1)
    out_HQD = (weights_KRL @ v_KLD).view(num_heads, num_queries, -1)
    return out_HQD.transpose(0, 1).to(q_QHD.dtype), lse_HQ


def _softmax(
    q_QHD: Tensor, k_LKD: Tensor, bias: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [H, Q, L], LSE [H, Q], and the capped scores before the bias [H, Q, L].

    A query that sees no key has no weights, and an LSE of -inf.
    """
    num_queries, _, head_size = q_QHD.shape
    num_kv_heads, wide = k_LKD.shape[1], wide_dtype(q_QHD)
    q_QKGD = q_QHD.to(wide).reshape(num_queries, num_kv_heads, -1, head_size)
    k_K1DL = k_LKD.to(wide).permute(1, 2, 0)[:, None]
    scores_HQL = ((q_QKGD.permute(1, 2, 0, 3) @ k_K1DL) * rules.scale).flatten(0, 1)
    if rules.soft_cap > 0:
        scores_HQL = rules.soft_cap * torch.tanh(scores_HQL / rules.soft_cap)
    biased_HQL = scores_HQL + bias
    lse_HQ = biased_HQL.logsumexp(-1)
    anchor_HQ = lse_HQ.masked_fill(torch.isneginf(lse_HQ), 0)
    return torch.exp(biased_HQL - anchor_HQ[..., None]), lse_HQ, scores_HQL


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums are kept in: float32, or float64 for inputs in it."""
    return torch.promote_types(x.dtype, torch.float32)


def _bias(
    part: slice, num_queries: int, k_LKD: Tensor, rules: Rules, slopes_H: Tensor | None
) -> Tensor:
    """The additive mask [1 or H, Q, L] in float32 of some of the queries."""
    num_keys, device = k_LKD.shape[0], k_LKD.device
    positions_Q = torch.arange(part.start, part.stop, device=device) + num_keys - num_queries
    ahead_QL = torch.arange(num_keys, device=device) - positions_Q[:, None]
    left, right = rules.window
    hidden_QL = torch.zeros_like(ahead_QL, dtype=torch.bool)
    if left >= 0:
        hidden_QL |= ahead_QL < -left
    if right >= 0:
        hidden_QL |= ahead_QL > right
    bias = torch.zeros(1, *ahead_QL.shape, device=device)
    if slopes_H is not None:
        bias = -slopes_H.float()[:, None, None] * ahead_QL.abs()
    return bias.masked_fill(hidden_QL, float("-inf"))
