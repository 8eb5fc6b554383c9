"""Code that calls the functions compiles whole."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nanovllm_flash_attn_compat
from nanovllm_flash_attn_compat import bounds, cache


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def starts(*lens: int) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def test_varlen_compiles_whole(compat: ModuleType) -> None:
    """One graph without a break, of which lengths are no part: other calls reuse it."""

    def call(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        arguments = (q * 2, k, k, cu_q, cu_k, 8, 9)
        rules = {"causal": True, "window_size": (4, 0), "softcap": 5.0}
        out, lse, _ = compat.flash_attn_varlen_func(*arguments, **rules, return_attn_probs=True)
        return out, lse, compat.flash_attn_varlen_func(*arguments, **rules)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for number, (query_lens, key_lens) in enumerate((((8, 3), (9, 4)), ((4, 8), (6, 7)))):
        q, k = torch.randn(sum(query_lens), 4, 24), torch.randn(sum(key_lens), 2, 24)
        arguments = (q, k, starts(*query_lens), starts(*key_lens))
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(*arguments)
        torch.testing.assert_close(found, call(*arguments), atol=0, rtol=0)


def test_kvcache_compiles_whole_and_stores_its_keys(compat: ModuleType) -> None:
    """The caches are written in place, as without compiling."""
    arguments = {
        "q": torch.randn(2, 1, 4, 24), "k": torch.randn(2, 1, 2, 24),
        "v": torch.randn(2, 1, 2, 24), "rotary_cos": torch.rand(32, 8),
        "rotary_sin": torch.rand(32, 8), "cache_seqlens": torch.tensor([15, 4]).int(),
        "block_table": torch.tensor([[5, 2], [0, 3]]).int(), "causal": True,
    }  # fmt: skip
    blocks = torch.randn(2, 6, 16, 2, 24)
    results = []
    for function in (
        compat.flash_attn_with_kvcache,
        torch.compile(compat.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"),
    ):
        k_cache, v_cache = blocks.clone().unbind()
        out = function(k_cache=k_cache, v_cache=v_cache, **arguments)
        results.append((out, k_cache, v_cache))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert not torch.equal(results[0][1], blocks[0])


def test_the_choice_of_a_backend_compiles_too() -> None:
    """Also at the first call of a device, which imports the backend."""

    def call(q: Tensor, k: Tensor) -> Any:
        return nanovllm_flash_attn_compat.flash_attn_with_kvcache(q + 1, k, k, cache_seqlens=9)

    q, k = torch.randn(2, 1, 4, 24), torch.randn(2, 16, 2, 24)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), call(q, k), atol=0, rtol=0)


def test_the_operators_keep_their_declarations() -> None:
    """opcheck: schemas are true, fake kernels match, and tracing with any shape works."""
    lens = torch.tensor([15, 4], dtype=torch.int32)
    torch.library.opcheck(bounds._checked, (lens, lens, 20, "f", "cache_seqlens", "make it larger"))
    new, blocks = torch.randn(2, 2, 2, 24), torch.randn(2, 6, 16, 2, 24)
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    torch.library.opcheck(cache._append, (new, new, *blocks.unbind(), lens, table))
