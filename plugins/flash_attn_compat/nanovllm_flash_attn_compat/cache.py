"""A KV cache of `flash_attn_with_kvcache`: its lengths, its blocks, and new keys for it.

A dense cache is a paged one with a block per row. Shape suffixes: B rows, N new tokens of each, Q
queries, K KV heads, D head size, N blocks, P tokens per block, M blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_flash_attn_compat.backend import refuse
from nanovllm_flash_attn_compat.bounds import check, check_blocks, host_sees
from nanovllm_flash_attn_compat.rotary import rotate

FUNCTION = "flash_attn_with_kvcache"


@dataclass(frozen=True, slots=True)
class KVCache:
    """Blocks [N, P, K, D], and each row's blocks and length, which lie within these."""

    k: Tensor
    v: Tensor
    block_table: Tensor
    lens: Tensor

    @classmethod
    def of(
        cls,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: int | Tensor | None,
        cache_batch_idx: Tensor | None,
        block_table: Tensor | None,
        num_new: int,
    ) -> KVCache:
        """From flash-attn's parameters, with room for `num_new` tokens behind each length."""
        batch, ids = q.shape[0], "block_table"
        if block_table is None:
            rows = cache_batch_idx
            if rows is None:
                rows = torch.arange(batch, dtype=torch.int32, device=q.device)
            block_table, ids = rows.int()[:, None], "cache_batch_idx"
        num_blocks, block_size = k_cache.shape[:2]
        room = block_table.shape[1] * block_size - num_new
        if room < 0:
            refuse(
                FUNCTION, "k", f"{num_new} tokens", f"a row holds {room + num_new}; make it larger"
            )
        lens = _lengths(cache_seqlens, batch, room, num_new, q.device)
        if host_sees(block_table):
            block_table = check_blocks(
                block_table, lens + num_new, block_size, num_blocks, FUNCTION, ids
            )
        return cls(k_cache, v_cache, block_table, lens)

    def append(self, k: Tensor, v: Tensor) -> KVCache:
        """Store `k` and `v` [B, N, K, D] behind each row's tokens, in place."""
        _append(k, v, self.k, self.v, self.lens, self.block_table)
        return KVCache(self.k, self.v, self.block_table, self.lens + k.shape[1])

    def rotate(
        self, x_BTHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, advance: bool
    ) -> Tensor:
        """Rotate tokens at the positions behind each row's, or without `advance` all at the first.

        Positions beyond the tables are refused as far as the host sees, and else the last one.
        """
        steps = torch.arange(x_BTHD.shape[1], device=x_BTHD.device) * int(advance)
        positions_BT = self.lens.long()[:, None] + steps
        last = cos.shape[0] - 1
        positions_BT = check(
            positions_BT, positions_BT, last, FUNCTION, "rotary_cos", "pass longer tables"
        )
        return rotate(x_BTHD, cos, sin, positions_BT.clamp(max=last), interleaved)


def _lengths(
    cache_seqlens: int | Tensor | None, batch: int, room: int, num_new: int, device: torch.device
) -> Tensor:
    """The tokens in each row [B] int32, at most `room`; None: all that a row holds."""
    remedy = "the cache holds no more"
    if num_new:
        remedy += " and the new keys; make it larger"
    if isinstance(cache_seqlens, Tensor):
        lens = check(cache_seqlens, cache_seqlens, room, FUNCTION, "cache_seqlens", remedy)
        lens = lens.to(device, torch.int32)
        return lens.clamp(0, room) if num_new else lens  # else the operators cut it
    length = room if cache_seqlens is None else cache_seqlens
    if not 0 <= length <= room:
        refuse(FUNCTION, "cache_seqlens", length, f"values lie in 0 to {room}; {remedy}")
    return torch.full((batch,), length, dtype=torch.int32, device=device)


@torch.library.custom_op(
    "nanovllm_flash_attn_compat::append_to_cache", mutates_args=("k_cache", "v_cache")
)
def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, block_table: Tensor
) -> None:
    """Store `k` and `v` [B, N, K, D] behind each row's `lens` tokens. An operator, so that compiled
    code writes in place."""
    block_size = k_cache.shape[1]
    positions_BN = lens.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    blocks_BN = block_table.long().gather(1, positions_BN // block_size)
    k_cache[blocks_BN, positions_BN % block_size] = k
    v_cache[blocks_BN, positions_BN % block_size] = v
