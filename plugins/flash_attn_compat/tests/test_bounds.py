"""Lengths beyond the cache: refused where the host sees them, else cut, and never read outside."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanovllm_flash_attn_compat
from nanovllm_core.api import UnsupportedError
from nanovllm_flash_attn_compat import bounds, cache


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sees no values, as those on a GPU."""
    monkeypatch.setattr(bounds, "_checked", lambda x, *others: x)


def packed_table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V blocks, of which those in the block table [3, 2] alone are numbers; a view of a wider
    table whose other columns name a block of NaN."""
    cache = torch.full((2, 9, 16, 2, 24), math.nan)
    cache[:, 1:7] = torch.randn(2, 6, 16, 2, 24)
    wide = torch.zeros(3, 8, dtype=torch.int32)
    wide[:, :2] = torch.tensor([[3, 1], [6, 2], [4, 5]])
    return cache[0], cache[1], wide[:, :2]


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("queries", [1, 3])
def test_a_length_beyond_the_table_is_cut_to_it(compat: ModuleType, queries: int) -> None:
    """Also with new keys, of which there is room for 32 - new tokens; others keep their rows."""
    k_cache, v_cache, table = packed_table()
    q = torch.randn(3, queries, 4, 24)
    beyond, within = torch.tensor([33, 48, 7]).int(), torch.tensor([32, 32, 7]).int()
    found, expected = (
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=n, block_table=table)
        for n in (beyond, within)
    )
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    new = torch.randn(3, queries, 2, 24)
    results = []
    for lens in (beyond, within.clamp(max=32 - queries)):
        caches = (k_cache.clone(), v_cache.clone())
        out = compat.flash_attn_with_kvcache(
            q, *caches, new, new, cache_seqlens=lens, block_table=table, causal=True
        )
        results.append((out, *caches))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0, equal_nan=True)
    assert results[0][0].isfinite().all()


@pytest.mark.usefixtures("blind")
def test_packed_lengths_beyond_the_tensors_are_cut(compat: ModuleType) -> None:
    """Of blocks to the table, of packed keys to their tensor."""
    k_cache, v_cache, table = packed_table()
    q, starts_q = torch.randn(5, 4, 24), torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    beyond, within = torch.tensor([0, 40, 47, 79]).int(), torch.tensor([0, 32, 39, 71]).int()
    found, expected = (
        compat.flash_attn_varlen_func(
            q, k_cache, v_cache, starts_q, starts_k, 2, 99, block_table=table
        )
        for starts_k in (beyond, within)
    )
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    k = torch.full((60, 2, 24), math.nan)
    k[:39] = torch.randn(39, 2, 24)
    found = compat.flash_attn_varlen_func(
        q, k[:39], k[:39], starts_q, torch.tensor([0, 20, 30, 50]).int(), 2, 40
    )
    assert found.isfinite().all()


@pytest.mark.usefixtures("blind")
def test_positions_beyond_the_rotary_tables_take_the_last(compat: ModuleType) -> None:
    """A gather beyond them would read strange memory."""
    k_cache, v_cache, table = packed_table()
    q, new = torch.randn(3, 1, 4, 24), torch.randn(3, 1, 2, 24)
    angles = torch.rand(8, 6)
    lens = torch.tensor([7, 3, 20], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, new, new, angles.cos(), angles.sin(), lens, block_table=table
    )
    assert out.isfinite().all()


def test_debug_looks_at_what_lies_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stops looking behind the block, nested or not, also after an error."""

    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

    lens = torch.tensor([17], dtype=torch.int32).as_subclass(OnDevice)
    given = (lens, lens, 16, "f", "cache_seqlens", "make it larger")
    assert bounds.check(*given) is lens
    with nanovllm_flash_attn_compat.debug():
        with nanovllm_flash_attn_compat.debug():
            pass
        with pytest.raises(UnsupportedError, match=r"cache_seqlens=17 .*; make it larger"):
            bounds.check(*given)
    assert bounds.check(*given) is lens


def test_decode_whose_lengths_the_host_does_not_see_runs_one_operation(
    compat: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend's operator: checks of shapes, dtypes and devices launch nothing."""
    for module in (bounds, cache):
        monkeypatch.setattr(module, "host_sees", lambda x: False)
    k_cache, v_cache, table = packed_table()
    q, lens = torch.randn(3, 1, 4, 24), torch.tensor([32, 9, 20], dtype=torch.int32)
    operations = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore
            operations.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table)
    assert operations == [f"nanovllm_attention_{compat.BACKEND.name}.paged_attention.default"]
