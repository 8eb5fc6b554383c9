"""Attention of single queries to blocks, by lengths that stay on the device.

Nothing is read on the host, so a CUDA graph can hold it: every row is gathered as far as its block
table reaches, and keys that its query does not see are masked. The keys are worked off in parts,
whose results a running softmax joins (Milakov and Gimelshein 2018), so that memory is bounded.

Shape suffixes as in `nanovllm_attention_sdpa.dense`; B rows, R rows at a time, C keys at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm_attention_sdpa.dense import Rules, wide_dtype
from nanovllm_attention_sdpa.workspace import GATHER_LIMIT, slot_bytes


def attend_single(
    q_BHD: Tensor,
    k_NPKD: Tensor,
    v_NPKD: Tensor,
    table_BM: Tensor,
    lens_B: Tensor,
    rules: Rules,
    slopes: Tensor | None,
    limit: int = GATHER_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, D] and log-sum-exp [H, B]: zeros and -inf for a query that sees no key.

    A query is the last of its row's `lens_B` tokens; a length beyond the block table is cut to it.
    `slopes` [H] or [B, H]. Blocks may hold anything where no key is seen. `limit`: bytes of
    keys and values, with their wide copies.
    """
    batch, num_heads, head_size = q_BHD.shape
    block_size, num_kv_heads = k_NPKD.shape[1:3]
    capacity = table_BM.shape[1] * block_size
    lens_B = lens_B.clamp(0, capacity)
    slots = limit // slot_bytes(head_size, q_BHD.element_size(), copies_in_fp32=True)
    keys = max(1, min(capacity, slots // num_kv_heads))
    rows = max(1, slots // (num_kv_heads * keys))
    out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    lse_HB = torch.empty(num_heads, batch, dtype=wide_dtype(q_BHD), device=q_BHD.device)
    for first in range(0, batch, rows):
        part = slice(first, first + rows)
        slopes_here = slopes if slopes is None or slopes.dim() == 1 else slopes[part]
        out_BHD[part], lse_HB[:, part] = _attend_rows(
            q_BHD[part], k_NPKD, v_NPKD, table_BM[part], lens_B[part], rules, slopes_here, keys
        )
    return out_BHD, lse_HB


def _attend_rows(
    q_RHD: Tensor,
    k_NPKD: Tensor,
    v_NPKD: Tensor,
    table_RM: Tensor,
    lens_R: Tensor,
    rules: Rules,
    slopes: Tensor | None,
    keys: int,
) -> tuple[Tensor, Tensor]:
    """Some rows, `keys` keys of each at a time."""
    rows, num_heads, head_size = q_RHD.shape
    block_size, num_kv_heads = k_NPKD.shape[1:3]
    wide, capacity = wide_dtype(q_RHD), table_RM.shape[1] * block_size
    q_RKGD = q_RHD.to(wide).view(rows, num_kv_heads, -1, head_size)
    peak_RKG = q_RKGD.new_full(q_RKGD.shape[:3], float("-inf"))
    mass_RKG, mixed_RKGD = torch.zeros_like(peak_RKG), torch.zeros_like(q_RKGD)
    for start in range(0, capacity, keys):
        position_C = torch.arange(start, min(start + keys, capacity), device=q_RHD.device)
        ahead_RC = position_C - (lens_R[:, None] - 1)
        seen_RC = _seen(ahead_RC, rules.window)
        block_RC = torch.where(seen_RC, table_RM[:, position_C // block_size], 0)
        k_RCKD, v_RCKD = (x[block_RC, position_C % block_size].to(wide) for x in (k_NPKD, v_NPKD))
        # The weight of a hidden key is 0, and 0 times a NaN would be NaN.
        v_RCKD = v_RCKD.masked_fill(~seen_RC[:, :, None, None], 0)
        scores_RKGC = (q_RKGD @ k_RCKD.permute(0, 2, 3, 1)) * rules.scale
        if rules.soft_cap > 0:
            scores_RKGC = rules.soft_cap * torch.tanh(scores_RKGC / rules.soft_cap)
        if slopes is not None:
            slopes_RKG1 = slopes.expand(rows, -1).to(wide).view(rows, num_kv_heads, -1, 1)
            scores_RKGC = scores_RKGC - slopes_RKG1 * ahead_RC.abs()[:, None, None]
        scores_RKGC = scores_RKGC.masked_fill(~seen_RC[:, None, None], float("-inf"))
        new_RKG = torch.maximum(peak_RKG, scores_RKGC.amax(-1))
        # A row that has seen no key yet keeps clear of inf - inf.
        anchor_RKG = new_RKG.masked_fill(torch.isneginf(new_RKG), 0)
        weights_RKGC = torch.exp(scores_RKGC - anchor_RKG[..., None])
        shrink_RKG = torch.exp(peak_RKG - anchor_RKG)
        mass_RKG = mass_RKG * shrink_RKG + weights_RKGC.sum(-1)
        mixed_RKGD = mixed_RKGD * shrink_RKG[..., None] + weights_RKGC @ v_RCKD.transpose(1, 2)
        peak_RKG = new_RKG
    out_RKGD = mixed_RKGD / mass_RKG.masked_fill(mass_RKG == 0, 1)[..., None]
    lse_RKG = peak_RKG + mass_RKG.log()
    return out_RKGD.view(q_RHD.shape).to(q_RHD.dtype), lse_RKG.view(rows, num_heads).T


def _seen(ahead_RC: Tensor, window: tuple[int, int]) -> Tensor:
    """Whether a key, `ahead` of its row's query and last token, exists and is in the window."""
    seen_RC = ahead_RC <= 0
    if window[0] >= 0:
        seen_RC &= ahead_RC >= -window[0]
    return seen_RC
