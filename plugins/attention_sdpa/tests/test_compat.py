"""flash-attn's functions by its own signatures: every parameter is honoured or refused by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_attention_sdpa import compat_ops
from nanovllm_attention_sdpa.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from nanovllm_core.api import UnsupportedError

H, K, D = 4, 2, 16
QUERIES, KEYS = (3, 5, 1, 7), (3, 9, 6, 4)


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence, element by element, in float64: output [Q, H, D] and LSE [H, Q]."""
    scale = scale or 1 / math.sqrt(q.shape[-1])
    num_q, num_k, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.zeros(num_q, q.shape[1], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], num_q), math.inf, dtype=torch.float64)
    left, right = window
    for i in range(num_q):
        position = i + num_k - num_q
        low = max(0, position - left) if left >= 0 else 0
        high = min(num_k - 1, position + right) if right >= 0 else num_k - 1
        if causal:
            high = min(high, position)
        for h in range(q.shape[1]):
            seen = range(low, high + 1)
            if not seen:
                continue
            scores = []
            for j in seen:
                score = float(q[i, h].double() @ k[j, h // group].double()) * scale
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if slopes is not None:
                    score -= float(slopes[h]) * abs(position - j)
                scores.append(score)
            row = torch.tensor(scores, dtype=torch.float64)
            lse[h, i] = row.logsumexp(0)
            out[i, h] = row.softmax(0) @ v[low : high + 1, h // group].double()
    return out, lse


def starts(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


@pytest.fixture
def packed() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(sum(QUERIES), H, D),
        torch.randn(sum(KEYS), K, D),
        torch.randn(sum(KEYS), K, D),
    )


def by_sequence(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> tuple[Tensor, Tensor]:
    slopes = rules.pop("slopes", None)
    parts = [
        reference(*x, slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[i], **rules)
        for i, x in enumerate(zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True))
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.7},
    {"window_size": (2, 1)},
    {"window_size": (2, -1)},
    {"window_size": (-1, 0)},
    {"window_size": (3, 2), "causal": True},
    {"softcap": 1.5},
    {"softcap": 1.5, "causal": True, "window_size": (2, 2)},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    {"alibi_slopes": torch.rand(4, H), "causal": True},
]


def as_reference(rules: dict[str, Any]) -> dict[str, Any]:
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    return {names.get(name, name): value for name, value in rules.items()}


@pytest.mark.parametrize("rules", RULES, ids=[", ".join(rules) or "none" for rules in RULES])
@pytest.mark.parametrize("with_lse", [False, True])
def test_varlen_honours_its_parameters(
    packed: tuple[Tensor, Tensor, Tensor], rules: dict[str, Any], with_lse: bool
) -> None:
    """Alone and together, aligned to the last key, with more queries than keys in one sequence."""
    expected, expected_lse = by_sequence(*packed, **as_reference(rules))
    result = flash_attn_varlen_func(
        *packed, starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS),
        return_attn_probs=with_lse, **rules,
    )  # fmt: skip
    if not with_lse:
        assert isinstance(result, Tensor)
        close(result, expected)
        return
    out, lse, probabilities = result
    close(out, expected)
    close(lse, expected_lse)
    assert probabilities.numel() == 0


def test_varlen_reads_pages(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    """With a block table the keys lie in pages of any size, the unused ones NaN."""
    q, k, v = packed
    page, table = 4, torch.tensor([[5, 0, 0], [1, 7, 2], [4, 3, 0], [6, 0, 0]], dtype=torch.int32)
    caches = [torch.full((8, page, K, D), math.nan) for _ in range(2)]
    for row, parts in enumerate(zip(k.split(KEYS), v.split(KEYS), strict=True)):
        for cache, part in zip(caches, parts, strict=True):
            for j, token in enumerate(part):
                cache[table[row, j // page], j % page] = token
    out = flash_attn_varlen_func(
        q, *caches, starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS), causal=True,
        block_table=table,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    close(out, by_sequence(q, k, v, causal=True)[0])


def test_queries_without_keys_give_zeros(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    """The last sequence has 7 queries and 4 keys: its first 3 see nothing, causally."""
    for with_lse in (False, True):
        result = flash_attn_varlen_func(
            *packed, starts(QUERIES), starts(KEYS), 7, 9, causal=True, return_attn_probs=with_lse
        )
        out = result if isinstance(result, Tensor) else result[0]
        assert torch.equal(out[-7:-4], torch.zeros(3, H, D))
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_half_precision(
    packed: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, softcap: float
) -> None:
    """The output has q's dtype and its precision."""
    q, k, v = (x.to(dtype) for x in packed)
    out = flash_attn_varlen_func(
        q, k, v, starts(QUERIES), starts(KEYS), 7, 9, causal=True, softcap=softcap
    )
    assert isinstance(out, Tensor)
    assert out.dtype == dtype
    expected = by_sequence(q, k, v, causal=True, softcap=softcap)[0]
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == torch.float16 else 4e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0.1 is not supported: .*pass dropout_p=0.0"),
        ({"max_seqlen_q": 6}, r"max_seqlen_q=6 is not supported: a sequence has 7"),
        ({"max_seqlen_k": 8}, r"max_seqlen_k=8 is not supported: a sequence has 9"),
    ],
)
def test_varlen_refuses_by_name(
    packed: tuple[Tensor, Tensor, Tensor], changed: dict[str, Any], message: str
) -> None:
    """The parameter, its value and the remedy."""
    arguments = {"max_seqlen_q": 7, "max_seqlen_k": 9} | changed
    with pytest.raises(UnsupportedError, match=message):
        flash_attn_varlen_func(
            *packed, cu_seqlens_q=starts(QUERIES), cu_seqlens_k=starts(KEYS), **arguments
        )


LENS = (5, 0, 11)


@pytest.fixture
def cached() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "q": torch.randn(3, 2, H, D),
        "k_cache": torch.randn(3, 16, K, D),
        "v_cache": torch.randn(3, 16, K, D),
        "cache_seqlens": torch.tensor(LENS, dtype=torch.int32),
    }


@pytest.mark.parametrize("rules", RULES, ids=[", ".join(rules) or "none" for rules in RULES])
@pytest.mark.parametrize("with_lse", [False, True])
def test_kvcache_honours_its_parameters(
    cached: dict[str, Tensor], rules: dict[str, Any], with_lse: bool
) -> None:
    """The same masks over a cache, one row of which is empty."""
    if "alibi_slopes" in rules and rules["alibi_slopes"].dim() == 2:
        rules = rules | {"alibi_slopes": rules["alibi_slopes"][:3]}
    result = flash_attn_with_kvcache(**cached, return_softmax_lse=with_lse, **rules)
    out = result if isinstance(result, Tensor) else result[0]
    for row, length in enumerate(LENS):
        names = as_reference(rules)
        if "slopes" in names and names["slopes"].dim() == 2:
            names["slopes"] = names["slopes"][row]
        expected, lse = reference(
            cached["q"][row], cached["k_cache"][row, :length], cached["v_cache"][row, :length],
            **names,
        )  # fmt: skip
        close(out[row], expected)
        if with_lse:
            close(result[1][row], lse)


@pytest.mark.parametrize("paged", [False, True])
def test_kvcache_appends_in_place(cached: dict[str, Tensor], paged: bool) -> None:
    """New keys and values lie in the cache after the call, and the queries see them."""
    new_k, new_v = torch.randn(3, 2, K, D), torch.randn(3, 2, K, D)
    dense = {name: cached[name].clone() for name in ("k_cache", "v_cache")}
    for row, length in enumerate(LENS):
        dense["k_cache"][row, length : length + 2] = new_k[row]
        dense["v_cache"][row, length : length + 2] = new_v[row]
    arguments = dict(cached)
    if paged:  # pages of 4, each row's pages in its own order
        order = torch.tensor([[3, 7, 1, 9], [0, 2, 4, 6], [11, 10, 8, 5]], dtype=torch.int32)
        for name in ("k_cache", "v_cache"):
            pages = torch.empty(12, 4, K, D)
            pages[order.long()] = cached[name].view(3, 4, 4, K, D)
            arguments[name] = pages
        arguments["block_table"] = order
    out = flash_attn_with_kvcache(**arguments, k=new_k, v=new_v, causal=True)
    assert isinstance(out, Tensor)
    for row, length in enumerate(LENS):
        k, v = dense["k_cache"][row, : length + 2], dense["v_cache"][row, : length + 2]
        close(out[row], reference(cached["q"][row], k, v, causal=True)[0])
    after = arguments["k_cache"]
    if paged:
        after = after[arguments["block_table"].long()].flatten(1, 2)
    assert torch.equal(after, dense["k_cache"])


def test_kvcache_length_may_be_an_int_or_all_of_the_cache(cached: dict[str, Tensor]) -> None:
    """An int counts for every row; None means the whole cache."""
    del cached["cache_seqlens"]
    for given, length in ((7, 7), (None, 16)):
        out = flash_attn_with_kvcache(**cached, cache_seqlens=given)
        assert isinstance(out, Tensor)
        k, v = cached["k_cache"][2, :length], cached["v_cache"][2, :length]
        close(out[2], reference(cached["q"][2], k, v)[0])


def test_kvcache_batch_idx_names_the_caches(cached: dict[str, Tensor]) -> None:
    """Row 0 of the batch reads cache 2, and appends to it."""
    new = torch.randn(2, 1, K, D)
    out = flash_attn_with_kvcache(
        cached["q"][:2], cached["k_cache"], cached["v_cache"], new, new,
        cache_seqlens=cached["cache_seqlens"][:2],
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    assert torch.equal(cached["k_cache"][2, 5], new[0, 0])
    close(out[0], reference(cached["q"][0], cached["k_cache"][2, :6], cached["v_cache"][2, :6])[0])


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of one token [heads, D] as complex numbers."""
    half = angles.numel()
    head = x[:, : 2 * half]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(half), angles)
    real = torch.view_as_real(turned)
    return torch.cat(
        (real.flatten(-2) if interleaved else real.mT.flatten(-2), x[:, 2 * half :]), -1
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotates_queries_and_new_keys(
    cached: dict[str, Tensor], interleaved: bool, causal: bool
) -> None:
    """Keys at their positions; queries at theirs if causal, else all at cache_seqlens."""
    angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    new_k, new_v = torch.randn(3, 2, K, D), torch.randn(3, 2, K, D)
    before = cached["k_cache"].clone()
    out = flash_attn_with_kvcache(
        **cached, k=new_k, v=new_v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        rotary_interleaved=interleaved, causal=causal,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    for row, length in enumerate(LENS):
        k = torch.stack([turn(new_k[row, t], angles[length + t], interleaved) for t in range(2)])
        k = torch.cat((before[row, :length], k))
        torch.testing.assert_close(cached["k_cache"][row, : length + 2], k)
        q = torch.stack(
            [
                turn(cached["q"][row, t], angles[length + (t if causal else 0)], interleaved)
                for t in range(2)
            ]
        )
        v = torch.cat((cached["v_cache"][row, :length], new_v[row]))
        close(out[row], reference(q, k, v, causal=causal)[0])


def test_num_splits_changes_no_result(cached: dict[str, Tensor]) -> None:
    """It is a hint for speed."""
    first, second = (flash_attn_with_kvcache(**cached, num_splits=n) for n in (1, 4))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)


NEW = torch.zeros(3, 2, K, D)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache_leftpad": torch.zeros(3)}, "cache_leftpad=a tensor is not supported"),
        (
            {"cache_batch_idx": torch.zeros(3), "block_table": torch.zeros(3, 1)},
            "cache_batch_idx=a tensor is not supported: pages are named by block_table",
        ),
        ({"k": NEW}, "k=alone is not supported: pass k and v together"),
        ({"k": NEW, "v": NEW, "cache_seqlens": None}, "cache_seqlens=None is not supported"),
        ({"rotary_cos": torch.zeros(16, 4)}, "pass rotary_cos and rotary_sin together"),
        (
            {"rotary_cos": torch.zeros(16, 4), "rotary_sin": torch.zeros(16, 4)},
            "rotary_cos=a tensor is not supported: .*pass k and v",
        ),
        ({"k": NEW, "v": NEW, "cache_seqlens": 15}, "k=2 keys after 15 .*row 0 holds 16"),
        (
            {
                "k": NEW, "v": NEW, "cache_seqlens": 5,
                "rotary_cos": torch.zeros(6, 4), "rotary_sin": torch.zeros(6, 4),
            },
            "rotary_cos has 6 positions, position 6 is needed",
        ),
    ],
)  # fmt: skip
def test_kvcache_refuses_by_name(
    cached: dict[str, Tensor], changed: dict[str, Any], message: str
) -> None:
    """The parameter, its value and the remedy."""
    with pytest.raises(UnsupportedError, match=message):
        flash_attn_with_kvcache(**{**cached, **changed})


def test_signatures_are_flash_attns_own() -> None:
    """Names, order and defaults of flash-attn 2, so that positional calls mean the same."""
    required = inspect.Parameter.empty
    varlen = {
        "q": required, "k": required, "v": required, "cu_seqlens_q": required,
        "cu_seqlens_k": required, "max_seqlen_q": required, "max_seqlen_k": required,
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
        "block_table": None,
    }  # fmt: skip
    kvcache = {
        "q": required, "k_cache": required, "v_cache": required, "k": None, "v": None,
        "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
        "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False,
        "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None,
        "num_splits": 0, "return_softmax_lse": False,
    }  # fmt: skip
    for function, expected in (
        (flash_attn_varlen_func, varlen),
        (flash_attn_with_kvcache, kvcache),
    ):
        parameters = inspect.signature(function).parameters
        assert {name: p.default for name, p in parameters.items()} == expected
        assert list(parameters) == list(expected)


def test_lengths_beyond_the_cache_are_refused() -> None:
    """Cutting them to what the cache holds would be another computation than was asked for."""
    q, cache = torch.randn(2, 1, H, D), torch.randn(2, 32, K, D)
    with pytest.raises(UnsupportedError, match=r"cache_seqlens=40.*the cache holds 32"):
        flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=40)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("rules", RULES, ids=[", ".join(rules) or "none" for rules in RULES])
def test_varlen_has_the_gradients_of_its_output_and_lse(
    rules: dict[str, Any], heads: tuple[int, int], with_lse: bool
) -> None:
    """Against finite differences in float64: GQA, ragged lengths, windows, soft cap, ALiBi."""
    if "alibi_slopes" in rules and heads[0] != H:
        pytest.skip("one slope per head of the other cases")
    generator = torch.Generator().manual_seed(0)
    query_lens, key_lens = (2, 3, 1, 0), (2, 4, 0, 2)  # a row without keys, one without queries
    q, k, v = (
        torch.randn(sum(lens), n, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for lens, n in ((query_lens, heads[0]), (key_lens, heads[1]), (key_lens, heads[1]))
    )

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = flash_attn_varlen_func(
            q, k, v, starts(query_lens), starts(key_lens), 3, 4, return_attn_probs=with_lse, **rules
        )
        if isinstance(found, Tensor):
            return (found,)
        seen = found[1].isfinite()  # the LSE of a query without keys is +inf
        return found[0], found[1][seen]

    assert torch.autograd.gradcheck(outputs, (q, k, v), fast_mode=True)


def test_gradients_of_packed_attention_equal_torchs_own(
    packed: tuple[Tensor, Tensor, Tensor],
) -> None:
    """In float32, many slices of queries: those of SDPA under autograd."""
    q, k, v = (x[:3].clone().requires_grad_() for x in packed)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, ends, ends, 3, 3, causal=True)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    expected = torch.autograd.grad(dense.square().sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_slices_of_queries_change_no_gradient(
    packed: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences are worked off in slices, forward and backward."""
    q, k, v = (x.clone().requires_grad_() for x in packed)
    cu_q, cu_k = starts(QUERIES), starts(KEYS)

    def grads() -> tuple[Tensor, ...]:
        out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 9, causal=True, softcap=2.0)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = grads()
    monkeypatch.setattr("nanovllm_attention_sdpa.workspace.BIAS_LIMIT", 300)
    for one, other in zip(grads(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_that_do_not_exist_are_refused(
    packed: tuple[Tensor, Tensor, Tensor], cached: dict[str, Tensor]
) -> None:
    """Pages, slopes and caches get none; the error says what to do instead."""
    q, k, v = packed
    cu_q, cu_k = starts(QUERIES), starts(KEYS)
    slopes = torch.ones(H, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"alibi_slopes=.*detach"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 9, alibi_slopes=slopes)
    table = torch.zeros(4, 1, dtype=torch.int32)
    pages = torch.zeros(1, 16, K, D)
    with pytest.raises(UnsupportedError, match="pass packed k and v"):
        flash_attn_varlen_func(
            q.clone().requires_grad_(), pages, pages, cu_q, cu_k, 7, 9, block_table=table
        )
    with pytest.raises(UnsupportedError, match="use flash_attn_varlen_func"):
        flash_attn_with_kvcache(**{**cached, "q": cached["q"].clone().requires_grad_()})


@pytest.mark.parametrize("with_lse", [False, True])
def test_varlen_compiles_whole_with_its_gradient(with_lse: bool) -> None:
    """One graph forward, one backward, of which the lengths are no part."""
    torch.compiler.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        found = flash_attn_varlen_func(
            q * 2, k, v, cu_q, cu_k, 8, 9, causal=True, window_size=(4, 0), softcap=5.0,
            return_attn_probs=with_lse,
        )  # fmt: skip
        if isinstance(found, Tensor):
            return found.square().sum()
        return found[0].square().sum() + found[1].exp().sum()

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


@pytest.mark.parametrize("appending", [False, True])
def test_kvcache_compiles_whole_and_stores_its_keys(
    cached: dict[str, Tensor], appending: bool
) -> None:
    """The caches are written in place, as without compiling."""
    torch.compiler.reset()
    new = {name: torch.randn(3, 2, K, D) for name in ("k", "v")} if appending else {}
    results = []
    for function in (
        flash_attn_with_kvcache,
        torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"),
    ):
        arguments = {name: x.clone() for name, x in cached.items()}
        out, lse = function(**arguments, **new, causal=True, return_softmax_lse=True)
        results.append((out, lse, arguments["k_cache"], arguments["v_cache"]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_the_operators_keep_their_declarations(
    packed: tuple[Tensor, Tensor, Tensor], cached: dict[str, Tensor]
) -> None:
    """opcheck: schemas are true, fake kernels match, autograd is registered and traceable."""
    cu_q, cu_k = starts(QUERIES), starts(KEYS)
    for with_lse in (False, True):
        q, k, v = (x.clone().requires_grad_() for x in packed)
        arguments = (q, k, v, cu_q, cu_k, None, None, 7, 9, 0.3, 4, 0, 2.0, with_lse)
        torch.library.opcheck(compat_ops.attend_packed, arguments)
    q, k, v = packed
    lse = torch.randn(H, q.shape[0])
    for grad_lse in (None, lse):
        gradients = (torch.randn_like(q), grad_lse, q, k, v, cu_q, cu_k, None, 0.3, 4, 0, 2.0)
        torch.library.opcheck(compat_ops.attend_packed_backward, gradients)
    new = torch.randn(3, 2, K, D)
    for extra in ((None, None), (new, new)):
        torch.library.opcheck(
            compat_ops.attend_cache,
            (
                cached["q"], cached["k_cache"], cached["v_cache"], *extra, None, None,
                cached["cache_seqlens"], None, None, None, 0.3, 4, 0, 2.0, True, True,
            ),
        )  # fmt: skip
