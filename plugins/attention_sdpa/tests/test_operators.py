"""Packed and paged attention as functions: gradients, declarations, decode that can be captured.

Their numbers are compared in nanovllm-flash-attn-compat, whose functions call them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_attention_sdpa import operators
from nanovllm_attention_sdpa.dense import Rules
from nanovllm_attention_sdpa.operators import packed_attention, paged_attention
from nanovllm_attention_sdpa.single import attend_single
from nanovllm_core.api import UnsupportedError
from nanovllm_kit.recording import record

H, K, D = 4, 2, 16
QUERIES, KEYS = (3, 5, 1, 7), (3, 9, 6, 4)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
RULES: list[dict[str, Any]] = [
    {},
    {"window": (-1, 0)},
    {"window": (2, 1)},
    {"soft_cap": 1.5},
    {"soft_cap": 1.5, "window": (2, 0)},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES.repeat(4, 1) + 0.1, "window": (-1, 0), "soft_cap": 2.0},
]
IDS = [", ".join(rules) or "none" for rules in RULES]


def starts(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def packed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(sum(QUERIES), H, D, generator=generator, dtype=dtype),
        torch.randn(sum(KEYS), K, D, generator=generator, dtype=dtype),
        torch.randn(sum(KEYS), K, D, generator=generator, dtype=dtype),
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("rules", RULES, ids=IDS)
def test_packed_attention_has_the_gradients_of_its_output_and_lse(
    rules: dict[str, Any], heads: tuple[int, int]
) -> None:
    """Against finite differences in float64: GQA, ragged lengths, windows, soft cap, ALiBi."""
    generator = torch.Generator().manual_seed(0)
    query_lens, key_lens = (2, 3, 1, 0), (2, 4, 0, 2)  # a row without keys, one without queries
    q, k, v = (
        torch.randn(sum(lens), n, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for lens, n in ((query_lens, heads[0]), (key_lens, heads[1]), (key_lens, heads[1]))
    )
    for with_lse in (False, True):

        def outputs(q: Tensor, k: Tensor, v: Tensor, with_lse: bool = with_lse) -> Any:
            out, lse = packed_attention(
                q, k, v, starts(query_lens), starts(key_lens), 3, 4, scale=0.5, with_lse=with_lse,
                **rules,
            )  # fmt: skip
            return (out, lse[lse.isfinite()]) if with_lse else out

        assert torch.autograd.gradcheck(outputs, (q, k, v), fast_mode=True)


def test_gradients_of_packed_attention_equal_torchs_own() -> None:
    """In float32: those of SDPA under autograd."""
    q, k, v = (x[:3].clone().requires_grad_() for x in packed())
    ends = torch.tensor([0, 3], dtype=torch.int32)
    out, _ = packed_attention(q, k, v, ends, ends, 3, 3, scale=D**-0.5, window=(-1, 0))
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    expected = torch.autograd.grad(dense.square().sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_with_blocks_are_refused_before_anything_is_computed() -> None:
    """Packed keys alone have gradients."""
    q, cache = torch.randn(3, H, D), torch.randn(2, 4, K, D)
    ends, table = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    call = (cache, cache, ends, ends, 3, 3)
    with pytest.raises(UnsupportedError, match=r"block_table.*no_grad\(\)"):
        packed_attention(q.requires_grad_(), *call, scale=1.0, block_table=table)
    with torch.no_grad():
        packed_attention(q, *call, scale=1.0, block_table=table)


def test_slices_of_queries_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are worked off in slices, forward and backward."""
    q, k, v = (x.clone().requires_grad_() for x in packed())

    def grads() -> tuple[Tensor, ...]:
        out, _ = packed_attention(
            q, k, v, starts(QUERIES), starts(KEYS), 7, 9, scale=0.3, window=(-1, 0), soft_cap=2.0
        )
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = grads()
    monkeypatch.setattr("nanovllm_attention_sdpa.workspace.BIAS_LIMIT", 300)
    for one, other in zip(grads(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_compile_whole() -> None:
    """One graph forward, one backward, of which the lengths are no part."""
    torch.compiler.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        out, lse = packed_attention(
            q * 2, k, v, cu_q, cu_k, 8, 9, scale=0.3, window=(4, 0), soft_cap=5.0, with_lse=True
        )
        return out.square().sum() + lse.exp().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for query_lens, key_lens in (((8, 8), (9, 9)), ((4, 7), (6, 7))):
        q, k, v = (
            torch.randn(sum(lens), n, D).requires_grad_()
            for lens, n in ((query_lens, H), (key_lens, K), (key_lens, K))
        )
        cu_q, cu_k = starts(query_lens), starts(key_lens)
        found, expected = (
            torch.autograd.grad(f(q, k, v, cu_q, cu_k), (q, k, v)) for f in (compiled, loss)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_operators_keep_their_declarations() -> None:
    """opcheck: schemas are true, fake kernels match, autograd is registered and traceable."""
    cu_q, cu_k = starts(QUERIES), starts(KEYS)
    q, k, v = (x.requires_grad_() for x in packed())
    for with_lse in (False, True):
        arguments = (q, k, v, cu_q, cu_k, None, None, 0.3, 4, 0, 2.0, with_lse)
        torch.library.opcheck(operators._packed, arguments)
    q, k, v = packed()
    gradients = (torch.randn_like(q), torch.randn(H, q.shape[0]), q, k, v, cu_q, cu_k, None)
    torch.library.opcheck(operators._packed_backward, (*gradients, 0.3, 4, 0, 2.0))
    cache, lens = torch.randn(6, 16, K, D), torch.tensor([15, 4], dtype=torch.int32)
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    arguments = (torch.randn(2, 2, H, D), cache, cache, table, lens, None, 0.3, 4, 0, 2.0, True)
    torch.library.opcheck(operators._paged, arguments)


def blocks(lens: list[int], block_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V blocks with NaN beside the rows' keys, their table, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lens) // block_size)
    order = torch.randperm(len(lens) * width + 1, generator=generator)[: len(lens) * width]
    table = order.view(len(lens), width).int()
    k, v = torch.randn(2, len(lens) * width + 1, block_size, K, D, generator=generator).unbind()
    for row, length in enumerate(lens):
        for at in range(length, width * block_size):
            for cache in (k, v):
                cache[table[row, at // block_size], at % block_size] = math.nan
    return k, v, table, torch.tensor(lens, dtype=torch.int32)


@pytest.mark.parametrize("limit", [1, 20_000, 2**30], ids=["a key at a time", "parts", "whole"])
@pytest.mark.parametrize("rules", RULES[:6], ids=IDS[:6])
def test_decode_by_lengths_on_the_device_equals_decode_by_lengths_on_the_host(
    rules: dict[str, Any], limit: int
) -> None:
    """At any size of its parts, with NaN wherever a row has no key."""
    k, v, table, lens = blocks([37, 0, 1, 64, 20], block_size=8, seed=limit % 7)
    q = torch.randn(5, H, D)
    expected, expected_lse = paged_attention(
        q[:, None], k, v, table, lens, scale=0.3, with_lse=True, **rules
    )
    slopes = rules.get("alibi_slopes")
    bent = Rules(0.3, rules.get("window", (-1, -1)), rules.get("soft_cap", 0.0))
    out, lse = attend_single(q, k, v, table, lens, bent, slopes, limit)
    torch.testing.assert_close(out, expected[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse[:, :, 0].T, rtol=1e-5, atol=1e-5)
    beyond = torch.where(lens == 64, 10**6, lens)  # is cut to what the table holds
    cut, _ = attend_single(q, k, v, table, beyond, bent, slopes, limit)
    assert torch.equal(cut, out)


def test_decode_by_lengths_on_the_device_can_be_captured() -> None:
    """Nothing is read on the host, and a replay follows lengths, tables and queries."""
    k, v, table, lens = blocks([37, 0, 1, 64, 20], block_size=8, seed=1)
    q, rules = torch.randn(5, H, D), Rules(0.3, (30, 0), 2.0)
    with record() as recording:
        out, lse = attend_single(q, k, v, table, lens, rules, SLOPES, 20_000)
    other_k, other_v, other_table, other_lens = blocks([3, 64, 0, 41, 41], block_size=8, seed=2)
    for mine, other in ((k, other_k), (v, other_v), (table, other_table), (lens, other_lens)):
        mine.copy_(other)
    q.normal_()
    recording.replay()
    expected, expected_lse = attend_single(q, k, v, table, lens, rules, SLOPES)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_decode_by_lengths_on_the_device_gathers_no_more_than_its_limit() -> None:
    """However far the block table reaches: the largest tensor is one copy of a part of the keys."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result._base is None:
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    table = torch.zeros(3, 1000, dtype=torch.int32)
    cache, q = torch.randn(1, 16, K, D), torch.randn(3, H, D)
    limit = 2**20
    with Watch():
        attend_single(q, cache, cache, table, torch.tensor([9, 16_000, 1]), Rules(0.3), None, limit)
    assert 0 < largest <= limit // 4
