"""Rotary embedding as flash-attn's `flash_attn_with_kvcache` applies it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm_core.api import UnsupportedError


def rotate(
    x_BTHD: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Sequence[int],
    interleaved: bool,
    *,
    advance: bool,
) -> Tensor:
    """Rotate the first R of D dimensions by `cos`, `sin` [positions, R / 2].

    Row b's tokens are at positions `starts[b]` and on, or with `advance` false all at `starts[b]`.
    Pairs are dimensions (0, 1), (2, 3), … if interleaved, else (i, i + R / 2).
    """
    tokens = x_BTHD.shape[1]
    steps = torch.arange(tokens) if advance else torch.zeros(tokens, dtype=torch.long)
    positions_BT = torch.tensor(list(starts))[:, None] + steps
    last = int(positions_BT.max()) if positions_BT.numel() else -1
    if last >= cos.shape[0]:
        raise UnsupportedError(
            f"flash_attn_with_kvcache: rotary_cos has {cos.shape[0]} positions, position {last} is "
            "needed; pass longer tables"
        )
    index = positions_BT.to(cos.device)
    cos_BT1R, sin_BT1R = (table[index].float()[:, :, None] for table in (cos, sin))
    half = cos.shape[1]
    rotated, rest = x_BTHD[..., : 2 * half].float(), x_BTHD[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    turned = (first * cos_BT1R - second * sin_BT1R, first * sin_BT1R + second * cos_BT1R)
    pairs = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((pairs.to(x_BTHD.dtype), rest), dim=-1)
