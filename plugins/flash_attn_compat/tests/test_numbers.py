"""Both functions on both backends equal a float64 reference, in calls drawn at random."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

SEEDS = range(10)


def dtype_of(compat: ModuleType, seed: int) -> torch.dtype:
    """Triton's interpreter computes bfloat16 wrongly."""
    half = torch.float16 if compat.BACKEND.name == "triton" or seed % 4 == 1 else torch.bfloat16
    return half if seed % 2 else torch.float32


def alibi_of(compat: ModuleType) -> bool:
    return "alibi_slopes" not in compat.BACKEND.lacks


@pytest.mark.parametrize("seed", SEEDS)
def test_varlen_equals_the_reference(compat: ModuleType, draw: Any, seed: int) -> None:
    """Head sizes to 256, packed and paged, every rule alone and with others, with LSE and without.

    Some sequences have no keys, some no queries, some more queries than keys.
    """
    call = draw["packed"](seed, dtype_of(compat, seed), alibi=alibi_of(compat))
    out, lse, pattern = compat.flash_attn_varlen_func(**call.arguments, return_attn_probs=True)
    call.assert_out(out)
    call.assert_lse(lse)
    assert pattern.numel() == 0
    call.assert_out(compat.flash_attn_varlen_func(**call.arguments))


@pytest.mark.parametrize("seed", range(20))
def test_kvcache_equals_the_reference(compat: ModuleType, draw: Any, seed: int) -> None:
    """One query and several, dense and paged, appended to and rotated; nothing else is written."""
    call = draw["cached"](seed, dtype_of(compat, seed), alibi=alibi_of(compat))
    before = {name: call.arguments[name].clone() for name in ("k_cache", "v_cache")}
    out, lse = compat.flash_attn_with_kvcache(**call.arguments, return_softmax_lse=True)
    call.assert_out(out)
    call.assert_lse(lse)
    limit = 1e-5 if out.dtype is torch.float32 else 1e-2
    written = call.arguments["k_cache"]
    torch.testing.assert_close(written, call.k_cache, atol=limit, rtol=limit, equal_nan=True)
    splits = {"num_splits": int(seed % 5 == 4)}
    call.assert_out(compat.flash_attn_with_kvcache(**call.arguments | before | splits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_batch_may_be_empty(compat: ModuleType, dtype: torch.dtype, num_queries: int) -> None:
    """As that of a rank without requests: no output, and no error."""
    q, blocks = torch.randn(0, num_queries, 4, 24).to(dtype), torch.randn(4, 16, 2, 24).to(dtype)
    rows = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 2, dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(q, blocks, blocks, cache_seqlens=rows, block_table=table)
    assert out.shape == q.shape


def test_cache_seqlens_may_be_one_integer_or_absent(compat: ModuleType, draw: Any) -> None:
    """An integer holds for every row; None means a full cache."""
    q, k = torch.randn(2, 1, 4, 24), torch.randn(2, 40, 2, 24)
    rows = torch.tensor([40, 40], dtype=torch.int32)
    expected = compat.flash_attn_with_kvcache(q, k, k, cache_seqlens=rows)
    for given in (40, None):
        assert torch.equal(compat.flash_attn_with_kvcache(q, k, k, cache_seqlens=given), expected)
    shorter = compat.flash_attn_with_kvcache(q, k, k, cache_seqlens=39)
    assert not torch.equal(shorter, expected)


def test_a_right_window_edge_of_zero_is_the_causal_mask(compat: ModuleType) -> None:
    """As flash-attn reads it."""
    q, k = torch.randn(6, 4, 24), torch.randn(6, 2, 24)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    causal, window = (
        compat.flash_attn_varlen_func(q, k, k, starts, starts, 6, 6, **rules)
        for rules in ({"causal": True}, {"window_size": (-1, 0)})
    )
    assert torch.equal(causal, window)


@pytest.mark.parametrize("queries", [1, 3])
def test_strides_of_dimensions_of_one_element_mean_nothing(
    compat: ModuleType, queries: int
) -> None:
    """One block of one KV head; on triton also where the copy engine could read it."""
    q, blocks = torch.randn(1, queries, 4, 24).half(), torch.randn(2, 1, 64, 1, 24).half()
    k, v = blocks.unbind()
    odd = v.as_strided(v.shape, (7, 24, 5, 1))
    found, expected = (compat.flash_attn_with_kvcache(q, k, x) for x in (odd, v))
    assert torch.equal(found, expected)


def test_packed_keys_may_have_strides_of_any_kind(compat: ModuleType) -> None:
    """Heads that are not contiguous, and other strides for v than for k."""
    q, k, v = torch.randn(6, 4, 24), torch.randn(6, 24, 2).mT, torch.randn(2, 6, 24).transpose(0, 1)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    found, expected = (
        compat.flash_attn_varlen_func(q, *kv, starts, starts, 6, 6)
        for kv in ((k, v), (k.contiguous(), v.contiguous()))
    )
    assert torch.equal(found, expected)
