"""How much memory the backend may take, and the slices that keep it there. Pure arithmetic.

A *slot* is one key and one value of one KV head: what a gather copies, and what its cost is
counted in.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm_core.api import InconsistentStateError

MIB = 1 << 20
WORKSPACE_LIMIT = 256 * MIB
"""Bytes that the backend holds at any shape: tables, gathered blocks and masks together."""

TABLE_LIMIT = 32 * MIB
"""Bytes of block ids and masks kept for a whole decode step; above it each slice makes its own."""

BIAS_LIMIT = 32 * MIB
"""Bytes of one slice's mask (and scores, where the kernel writes them out)."""

GATHER_LIMIT = WORKSPACE_LIMIT - TABLE_LIMIT - BIAS_LIMIT
"""Bytes of one slice's gathered keys and values, with the copies a kernel makes of them."""

CPU_CACHE = 2 * MIB
"""Bytes that a decode slice gathers on a CPU, so that attention finds them in a core's cache."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows and KV heads attended to in one call."""

    rows: slice
    heads: slice


def slot_bytes(head_size: int, itemsize: int, *, copies_in_fp32: bool) -> int:
    """Bytes that one gathered slot costs.

    torch's math kernel converts K and V to float32, scales them and lays them out anew.
    """
    copies = 3 * 4 if copies_in_fp32 else 0
    return 2 * head_size * (itemsize + copies)


def slice_rows_and_heads(rows: int, keys: int, num_kv_heads: int, max_slots: int) -> list[Slice]:
    """Cut `rows` by `num_kv_heads`, of `keys` slots each, into slices of at most `max_slots`.

    Whole rows first; where one row is too large, one row's heads. Raises InconsistentStateError if
    one head of one row does not fit: the backend refuses such lengths when it is made.
    """
    if keys > max_slots:
        raise InconsistentStateError(
            f"{keys} keys of one KV head exceed the workspace of {max_slots} slots; "
            "the backend should have refused this length when it was made"
        )
    if keys * num_kv_heads <= max_slots:
        step = max(1, max_slots // max(1, keys * num_kv_heads))
        every_head = slice(0, num_kv_heads)
        return [Slice(slice(i, min(i + step, rows)), every_head) for i in range(0, rows, step)]
    step = max_slots // keys
    return [
        Slice(slice(row, row + 1), slice(head, min(head + step, num_kv_heads)))
        for row in range(rows)
        for head in range(0, num_kv_heads, step)
    ]


def queries_per_slice(keys: int, score_bytes: int) -> int:
    """How many queries of one chunk may share a mask over `keys` keys; at least one.

    `score_bytes` is what one (query, key) pair costs: the mask, and each head's score where the
    kernel writes scores out.
    """
    return max(1, BIAS_LIMIT // max(1, keys * score_bytes))
