"""flash-attn's entry points: the same signatures, and every parameter honoured or refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from nanovllm_attention_triton import compat_ops
from nanovllm_attention_triton.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from nanovllm_core.api import UnsupportedError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu.py"
)
# flash-attn 2: (name, default) in order; a missing default is `...`.
VARLEN = [
    *((name, ...) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    *(("max_seqlen_q", ...), ("max_seqlen_k", ...), ("dropout_p", 0.0), ("softmax_scale", None)),
    *(("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0), ("alibi_slopes", None)),
    *(("deterministic", False), ("return_attn_probs", False), ("block_table", None)),
]
KVCACHE = [
    *(("q", ...), ("k_cache", ...), ("v_cache", ...), ("k", None), ("v", None)),
    *(("rotary_cos", None), ("rotary_sin", None), ("cache_seqlens", None)),
    *(("cache_batch_idx", None), ("cache_leftpad", None), ("block_table", None)),
    *(("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0)),
    *(("rotary_interleaved", True), ("alibi_slopes", None), ("num_splits", 0)),
    ("return_softmax_lse", False),
]


@pytest.mark.parametrize(
    ("function", "expected"), [(flash_attn_varlen_func, VARLEN), (flash_attn_with_kvcache, KVCACHE)]
)
def test_signatures_are_flash_attns_own(function, expected):
    """Positional calls written for flash-attn mean the same here."""
    found = [
        (p.name, ... if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
    ]
    assert found == expected


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    window: tuple[int, int] = (-1, -1), cap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[T, H, D], [L, K, D] -> float64 output [T, H, D] and log-sum-exp [H, T]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    left, right = window[0], 0 if causal else window[1]
    diagonal = k.shape[0] - q.shape[0]
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    if right >= 0:
        seen = seen.tril(diagonal + right)
    if left >= 0:
        seen = seen.triu(diagonal - left)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def packed(query_lens: list[int], key_lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(sum(query_lens), 4, 64, generator=generator),
        torch.randn(sum(key_lens), 2, 64, generator=generator),
        torch.randn(sum(key_lens), 2, 64, generator=generator),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_varlen_equals_the_reference(causal, paged):
    """Packed or paged keys, ragged, more keys than queries and, in one sequence, fewer."""
    query_lens, key_lens, scale = [5, 40, 3], [37, 40, 1], 0.2
    q, k, v = packed(query_lens, key_lens)
    table, keys, values = None, k, v
    if paged:
        table = torch.tensor([[3, 0, 5], [1, 2, 4], [6, 7, 7]], dtype=torch.int32)
        keys, values = (torch.full((8, 16, 2, 64), float("nan")) for _ in range(2))
        for row, (start, length) in enumerate(zip(starts(key_lens), key_lens, strict=False)):
            for t in range(length):
                keys[table[row, t // 16], t % 16] = k[start + t]
                values[table[row, t // 16], t % 16] = v[start + t]
    out, lse, pattern = flash_attn_varlen_func(
        q, keys, values, starts(query_lens), starts(key_lens), 40, 40,
        softmax_scale=scale, causal=causal, return_attn_probs=True, block_table=table,
    )  # fmt: skip
    assert pattern.numel() == 0
    for row in range(3):
        rows = slice(*starts(query_lens)[row : row + 2])
        cols = slice(*starts(key_lens)[row : row + 2])
        expected, expected_lse = attend(q[rows], k[cols], v[cols], causal, scale)
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, atol=1e-5, rtol=1e-5)
    if causal:
        assert (out[45:47] == 0).all(), "queries before the only key see nothing"


def test_a_right_window_edge_of_zero_is_the_causal_mask():
    """As flash-attn reads it; the scale defaults to 1/sqrt(D)."""
    q, k, v = packed([6], [6])
    cu = starts([6])
    causal = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True)
    window = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, window_size=(-1, 0))
    assert torch.equal(causal, window)
    expected, _ = attend(q, k, v, True, 64**-0.5)
    torch.testing.assert_close(causal.double(), expected, atol=1e-5, rtol=1e-5)


def cache(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, tokens, 2, 64, generator=generator),
        torch.randn(rows, tokens, 2, 64, generator=generator),
    )


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_a_dense_cache_equals_the_reference(queries, num_splits):
    """Rows of different lengths, one empty, chosen by cache_batch_idx."""
    k_cache, v_cache = cache(5, 70)
    q = torch.randn(3, queries, 4, 64, generator=torch.Generator().manual_seed(2))
    lens, rows = torch.tensor([70, 0, 33], dtype=torch.int32), torch.tensor([4, 1, 0])
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, cache_batch_idx=rows, causal=True,
        num_splits=num_splits,
    )  # fmt: skip
    assert (out[1] == 0).all()
    for row in (0, 2):
        keys, values = (x[rows[row], : lens[row]] for x in (k_cache, v_cache))
        expected, _ = attend(q[row], keys, values, True, 64**-0.5)
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_new_keys_are_stored_behind_the_cached_ones_before_attention():
    """In place, through the block table, across a page's edge; nothing else is written."""
    k_cache, v_cache = cache(6, 16)
    before = k_cache.clone()
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([15, 4], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, h, 64, generator=generator) for h in (4, 2, 2))
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(k_cache[5, 15], k[0, 0])
    assert torch.equal(k_cache[2, 0], k[0, 1])
    assert torch.equal(v_cache[0, 4:6], v[1])
    assert int((k_cache != before).any(-1).any(-1).sum()) == 4
    for row in range(2):
        pages = table[row].long()
        keys, values = (x[pages].flatten(0, 1)[: lens[row] + 2] for x in (k_cache, v_cache))
        expected, expected_lse = attend(q[row], keys, values, True, 64**-0.5)
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[row].double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_cache_seqlens_may_be_one_integer_or_absent():
    """An integer holds for every row; None means a full cache."""
    k_cache, v_cache = cache(2, 40)
    q = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(4))
    by_int = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=40)
    assert torch.equal(by_int, flash_attn_with_kvcache(q, k_cache, v_cache))
    shorter = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=39)
    assert not torch.equal(by_int, shorter)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("dropout_p", 0.1),
        ("softcap", -1.0),
        ("alibi_slopes", torch.ones(4)),
    ],
)
def test_varlen_refuses_by_name_what_it_cannot_do(parameter, value):
    """Ignoring it would change the numbers without a word."""
    q, k, v = packed([2], [2])
    cu = starts([2])
    with pytest.raises(UnsupportedError, match=rf"flash_attn_varlen_func\({parameter}="):
        flash_attn_varlen_func(q, k, v, cu, cu, 2, 2, **{parameter: value})


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("rotary_cos", torch.ones(8, 32)),
        ("rotary_sin", torch.ones(8, 32)),
        ("cache_leftpad", torch.zeros(1, dtype=torch.int32)),
        ("softcap", -1.0),
        ("alibi_slopes", torch.ones(4)),
        ("num_splits", 4),
        ("k", torch.ones(1, 1, 2, 64)),
    ],
)
def test_kvcache_refuses_by_name_what_it_cannot_do(parameter, value):
    """The message also says what to pass instead."""
    k_cache, v_cache = cache(1, 16)
    q = torch.ones(1, 1, 4, 64)
    with pytest.raises(UnsupportedError, match=rf"flash_attn_with_kvcache\({parameter}="):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, **{parameter: value})


def test_tensors_the_kernels_cannot_take_are_refused():
    """Head sizes, dtypes, groups: each with what was found."""
    q, k, v = packed([2], [2])
    cu = starts([2])

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        flash_attn_varlen_func(q, k, v, cu, cu, 2, 2)

    with pytest.raises(UnsupportedError, match="head size 32"):
        call(q[..., :32], k[..., :32], v[..., :32])
    with pytest.raises(UnsupportedError, match="one dtype"):
        call(q, k.half(), v.half())
    with pytest.raises(UnsupportedError, match="3 query and 2 KV heads"):
        call(q[:, :3], k, v)


def test_lengths_beyond_the_cache_are_refused_where_they_can_be_seen():
    """An integer anywhere, a tensor on a CPU: the kernels would read past the block table."""
    q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    new = torch.randn(2, 4, 2, 64)
    for lens in (33, torch.tensor([1, 33], dtype=torch.int32)):
        with pytest.raises(UnsupportedError, match=r"cache_seqlens=33\).*room for 32"):
            flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=lens)
    with pytest.raises(UnsupportedError, match=r"cache_seqlens=30\).*room for 28"):
        flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=30)


def test_keys_to_append_need_to_be_told_where():
    """k and v without cache_seqlens have no place to go."""
    q, cache, new = torch.randn(1, 1, 4, 64), torch.randn(1, 32, 2, 64), torch.randn(1, 4, 2, 64)
    with pytest.raises(UnsupportedError, match="cache_seqlens=None"):
        flash_attn_with_kvcache(q, cache, cache.clone(), new, new)


@pytest.mark.parametrize(("max_q", "max_k", "parameter"), [(2, 5, "q"), (3, 4, "k")])
def test_longest_lengths_that_are_too_short_are_refused(max_q, max_k, parameter):
    """A sequence longer than it was said to be would lose queries or read strange keys."""
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    with pytest.raises(UnsupportedError, match=f"cu_seqlens_{parameter}="):
        flash_attn_varlen_func(q, k, k, starts([3]), starts([5]), max_q, max_k)


RULES = [
    {"causal": True},
    {"causal": True, "window_size": (0, -1)},
    {"causal": True, "window_size": (7, 3), "softcap": 2.0},
    {"window_size": (5, 9)},
    {"window_size": (-1, 4)},
    {"window_size": (30, -1), "softcap": 5.0},
    {"softcap": 2.0},
]
IDS = [", ".join(f"{name}={value}" for name, value in rules.items()) for rules in RULES]


@pytest.mark.parametrize("rules", RULES, ids=IDS)
def test_varlen_honours_windows_and_soft_caps(rules):
    """Aligned to the last key, with fewer, as many and more queries than keys."""
    query_lens, key_lens = [5, 40, 3], [37, 40, 1]
    q, k, v = packed(query_lens, key_lens)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, starts(query_lens), starts(key_lens), 40, 40, return_attn_probs=True, **rules
    )
    for row in range(3):
        rows = slice(*starts(query_lens)[row : row + 2])
        cols = slice(*starts(key_lens)[row : row + 2])
        expected, expected_lse = attend(
            q[rows], k[cols], v[cols], rules.get("causal", False), 64**-0.5,
            rules.get("window_size", (-1, -1)), rules.get("softcap", 0.0),
        )  # fmt: skip
        torch.testing.assert_close(out[rows].double(), expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("rules", RULES, ids=IDS)
def test_kvcache_honours_windows_and_soft_caps(rules, queries):
    """By the decode kernels for one query, by the prefill kernel for several."""
    k_cache, v_cache = cache(2, 200)
    q = torch.randn(2, queries, 4, 64, generator=torch.Generator().manual_seed(2))
    lens = torch.tensor([200, 33], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, **rules)
    for row in range(2):
        keys, values = (x[row, : lens[row]] for x in (k_cache, v_cache))
        expected, _ = attend(
            q[row], keys, values, rules.get("causal", False), 64**-0.5,
            rules.get("window_size", (-1, -1)), rules.get("softcap", 0.0),
        )  # fmt: skip
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=2e-5)


def test_inputs_that_require_a_gradient_are_refused_with_the_remedy():
    """A gradient silently cut would train nothing; without grad mode there is none to cut."""
    q, k, v = packed([2], [2])
    cu = starts([2])
    for wrong in range(3):
        inputs = [x.clone().requires_grad_(i == wrong) for i, x in enumerate((q, k, v))]
        with pytest.raises(UnsupportedError, match=r"torch\.no_grad.*nanovllm_attention_sdpa"):
            flash_attn_varlen_func(*inputs, cu, cu, 2, 2)
        with torch.no_grad():
            assert flash_attn_varlen_func(*inputs, cu, cu, 2, 2).isfinite().all()
    k_cache, v_cache = cache(1, 16)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        flash_attn_with_kvcache(q[None].clone().requires_grad_(), k_cache, v_cache)


@pytest.mark.parametrize("with_lse", [False, True])
def test_varlen_compiles_whole(with_lse):
    """One graph without a break, of which the lengths are no part: the second call reuses it."""
    torch.compiler.reset()

    def call(q, k, v, cu_q, cu_k):
        return flash_attn_varlen_func(
            q * 2, k, v, cu_q, cu_k, 8, 9, causal=True, window_size=(4, 0), softcap=5.0,
            return_attn_probs=with_lse,
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = packed([8, 3], [9, 4])
    for query_lens, key_lens in (([8, 3], [9, 4]), ([4, 7], [6, 7])):
        arguments = (q, k, v, starts(query_lens), starts(key_lens))
        with torch.compiler.set_stance("default" if query_lens[0] == 8 else "fail_on_recompile"):
            found = compiled(*arguments)
        torch.testing.assert_close(found, call(*arguments), atol=0, rtol=0)


@pytest.mark.parametrize("queries", [1, 2])
def test_kvcache_compiles_whole_and_stores_its_keys(queries):
    """The caches are written in place, as without compiling."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, queries, h, 64, generator=generator) for h in (4, 2, 2))
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([15, 4], dtype=torch.int32)
    results = []
    for function in (
        flash_attn_with_kvcache,
        torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"),
    ):
        caches = cache(6, 16)
        out = function(q, *caches, k, v, cache_seqlens=lens, block_table=table, causal=True)
        results.append((out, *caches))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


def test_the_operators_keep_their_declarations():
    """opcheck: the schema is true, fake kernels match, and tracing with any shape works."""
    q, k, v = packed([2, 3], [4, 3])
    cu_q, cu_k = starts([2, 3]), starts([4, 3])
    for with_lse in (False, True):
        arguments = (q, k, v, cu_q, cu_k, None, 3, 4, 0.1, 2, 0, 1.0, with_lse)
        torch.library.opcheck(compat_ops.attend_packed, arguments)
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([15, 4], dtype=torch.int32)
    for queries in (1, 2):
        new = torch.randn(2, queries, 2, 64)
        torch.library.opcheck(compat_ops.append_to_cache, (new, new, *cache(6, 16), lens, table))
        q = torch.randn(2, queries, 4, 64)
        for with_lse in (False, True):
            arguments = (q, *cache(6, 16), lens, table, 0.1, -1, 0, 0.0, True, with_lse)
            torch.library.opcheck(compat_ops.attend_cache, arguments)
