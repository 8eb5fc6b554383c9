"""On a GPU: both backends in half precision at drawn head sizes, captured, compiled, in bounds."""

from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nanovllm_flash_attn_compat
from nanovllm_core.api import UnsupportedError
from nanovllm_flash_attn_compat import chosen_backend, debug

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=["triton", "sdpa"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(f"nanovllm_flash_attn_compat.{request.param}")


def alibi_of(backend: ModuleType) -> bool:
    return "alibi_slopes" not in backend.BACKEND.lacks


@pytest.mark.parametrize("seed", range(24))
def test_varlen_equals_the_reference(backend: ModuleType, draw: Any, seed: int) -> None:
    """Head sizes drawn from 1 to 256, as on the CPU."""
    call = draw["packed"](seed, HALVES[seed % 2], alibi=alibi_of(backend), device="cuda")
    out, lse, _ = backend.flash_attn_varlen_func(**call.arguments, return_attn_probs=True)
    call.assert_out(out)
    call.assert_lse(lse)
    call.assert_out(backend.flash_attn_varlen_func(**call.arguments))


@pytest.mark.parametrize("seed", range(48))
def test_kvcache_equals_the_reference(backend: ModuleType, draw: Any, seed: int) -> None:
    """Decode by the decode kernels and, with an LSE, by those of prefill."""
    call = draw["cached"](seed, HALVES[seed % 2], alibi=alibi_of(backend), device="cuda")
    caches = {name: call.arguments[name].clone() for name in ("k_cache", "v_cache")}
    call.assert_out(backend.flash_attn_with_kvcache(**call.arguments))
    out, lse = backend.flash_attn_with_kvcache(**call.arguments | caches, return_softmax_lse=True)
    call.assert_out(out)
    call.assert_lse(lse)


def test_the_gpu_is_served_by_triton() -> None:
    name, reason = chosen_backend("cuda")
    assert name == "triton"
    assert reason
    q, k = (torch.randn(2, n, h, 64, device="cuda").half() for n, h in ((1, 4), (32, 2)))
    one, other = (
        module.flash_attn_with_kvcache(q, k, k, cache_seqlens=20)
        for module in (
            nanovllm_flash_attn_compat,
            import_module("nanovllm_flash_attn_compat.triton"),
        )
    )
    assert torch.equal(one, other)


def paged(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """K and V blocks of 16 tokens, NaN in those that the block table does not name."""
    num_blocks = rows * width
    caches = torch.full((2, num_blocks + 8, 16, 2, 96), math.nan, device="cuda").bfloat16()
    caches[:, 4:-4] = torch.randn(2, num_blocks, 16, 2, 96, device="cuda").bfloat16()
    table = torch.randperm(num_blocks, device="cuda").int().view(rows, width) + 4
    return caches[0], caches[1], table


def test_a_captured_decode_follows_its_inputs(backend: ModuleType) -> None:
    """Appending, with lengths, tables and queries changed between replays; no call reads a value
    on the host."""
    k_cache, v_cache, table = paged(rows=4, width=8)
    lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(4, 1, h, 96, device="cuda").bfloat16() for h in (8, 2, 2))

    def step(k_cache: Tensor, v_cache: Tensor) -> Any:
        return backend.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, causal=True,
            window_size=(50, -1),
        )  # fmt: skip

    own = (k_cache.clone(), v_cache.clone())
    step(*own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*own)
    for values in ([0, 1, 64, 127], [127, 15, 16, 17], [5, 500, 3, 2]):
        lens.copy_(torch.tensor(values, dtype=torch.int32))
        table.copy_(table.flip(0).roll(1, 1))
        for x in (q, k, v):
            x.normal_()
        for mine, start in zip(own, (k_cache, v_cache), strict=True):
            mine.copy_(start)
        graph.replay()
        eager_cache = (k_cache.clone(), v_cache.clone())
        expected = step(*eager_cache)
        assert out.isfinite().all()
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
        torch.testing.assert_close(own, eager_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_lengths_beyond_the_cache_are_cut_and_in_debug_refused(
    backend: ModuleType, queries: int
) -> None:
    """The device is well afterwards; with new keys there is room for as many fewer."""
    k_cache, v_cache, table = paged(rows=3, width=2)
    q = torch.randn(3, queries, 8, 96, device="cuda").bfloat16()
    new = torch.randn(3, queries, 2, 96, device="cuda").bfloat16()
    for extra, room in (({}, 32), ({"k": new, "v": new}, 32 - queries)):
        results = []
        for values in ((33, 2**30, 7), (room, room, 7)):
            caches = (k_cache.clone(), v_cache.clone())
            lens = torch.tensor(values, dtype=torch.int32, device="cuda")
            arguments = {"cache_seqlens": lens, "block_table": table, **extra}
            out = backend.flash_attn_with_kvcache(q, *caches, causal=True, **arguments)
            assert out.isfinite().all()
            results.append((out, *caches))
            if max(values) > room:
                with debug(), pytest.raises(UnsupportedError, match=rf"cache_seqlens={2**30} "):
                    backend.flash_attn_with_kvcache(q, *caches, causal=True, **arguments)
        torch.testing.assert_close(results[0], results[1], atol=0, rtol=0, equal_nan=True)
    with debug(), pytest.raises(UnsupportedError, match=r"block_table=1000 .*0 to 13"):
        backend.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=table[:, 0] * 0 + 20, block_table=table * 0 + 1000
        )


def test_compiled_code_equals_eager(backend: ModuleType) -> None:
    """Through inductor: windows and soft caps, packed keys and a cache that is appended to."""
    torch.compiler.reset()
    torch.manual_seed(0)

    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        return backend.flash_attn_varlen_func(
            q * 2, k, v, starts, starts, 200, 200, causal=True, window_size=(50, 0), softcap=20.0
        )

    def cached(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lens: Tensor
    ) -> Any:
        return backend.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True, window_size=(50, 0)
        )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    starts = torch.tensor([0, 200, 230], dtype=torch.int32, device="cuda")
    inputs = (random(230, 8, 96), random(230, 2, 96), random(230, 2, 96), starts)
    found = torch.compile(packed, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, packed(*inputs), atol=1e-2, rtol=1e-2)
    lens = torch.tensor([100, 7], dtype=torch.int32, device="cuda")
    new = (random(2, 1, 2, 96), random(2, 1, 2, 96))
    caches = (random(2, 128, 2, 96), random(2, 128, 2, 96))
    results = []
    for function in (torch.compile(cached, fullgraph=True), cached):
        own = tuple(cache.clone() for cache in caches)
        out = function(inputs[0][:2, None], *own, *new, lens)
        results.append((out, *own))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
