"""Rotary embedding as flash-attn's `flash_attn_with_kvcache` applies it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x_BTHD: Tensor, cos: Tensor, sin: Tensor, positions_BT: Tensor, interleaved: bool
) -> Tensor:
    """Rotate the first R of D dimensions by `cos`, `sin` [positions, R / 2].

    `positions_BT` is int64. Pairs are dimensions (0, 1), (2, 3), … if interleaved, else
    (i, i + R / 2).
    """
    cos_BT1R, sin_BT1R = (table[positions_BT].float()[:, :, None] for table in (cos, sin))
    half = cos.shape[1]
    rotated, rest = x_BTHD[..., : 2 * half].float(), x_BTHD[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    turned = (first * cos_BT1R - second * sin_BT1R, first * sin_BT1R + second * cos_BT1R)
    pairs = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((pairs.to(x_BTHD.dtype), rest), dim=-1)
