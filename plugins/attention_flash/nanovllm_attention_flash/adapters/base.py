"""What an adapter is given and must do: the same two functions for every provider.

Shape suffixes as in `nanovllm_core.interfaces.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What an adapter is made with: the scale of the scores, and `AttentionConfig`'s rules."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def window_size(self) -> tuple[int, int]:
        """flash-attn's (left, right): keys beside a query's own, of a causal mask."""
        return (-1 if self.sliding_window is None else self.sliding_window - 1, 0)

    def options(self) -> dict[str, tuple[int, int] | float]:
        """flash-attn's `window_size` and `softcap`, where they are set."""
        options: dict[str, tuple[int, int] | float] = {}
        if self.sliding_window is not None:
            options["window_size"] = self.window_size
        if self.soft_cap is not None:
            options["softcap"] = self.soft_cap
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Rows of one query each. All tensors int32 on the device, at addresses that do not change.

    `block_table` [B, M]; `key_lens` [B], 0 for a padded row; `key_lens_from_1` [B], the same with
    1 for a padded row; `query_starts` [B + 1], 0 to B. `max_key_len` is a host bound.
    """

    block_table: Tensor
    key_lens: Tensor
    key_lens_from_1: Tensor
    query_starts: Tensor
    max_key_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Packed chunks, each the last positions of its sequence. All tensors int32 on the device.

    `block_table` [S, M]; `key_lens` [S]; `query_starts` and `key_starts` [S + 1], running sums of
    the queries and of the keys. `max_query_len` and `max_key_len` are host integers of this step,
    `most_queries` the most that any step may have.
    """

    block_table: Tensor
    key_lens: Tensor
    query_starts: Tensor
    key_starts: Tensor
    max_query_len: int
    max_key_len: int
    most_queries: int


class Adapter(Protocol):
    """A provider's functions over blocks `k_cache`, `v_cache` [N, P, K, D]."""

    def prefill(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """Causal attention aligned to each sequence's last key; [T, H, D]."""
        ...

    def decode(self, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: DecodeBatch) -> Tensor:
        """Attention of one query per row to all its keys; [B, H, D]."""
        ...
