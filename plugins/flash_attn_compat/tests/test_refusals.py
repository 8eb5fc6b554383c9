"""Signatures are flash-attn's own, and every parameter is honoured or refused by its name."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nanovllm_flash_attn_compat
from nanovllm_core.api import UnsupportedError

REQUIRED = inspect.Parameter.empty
VARLEN = {
    "q": REQUIRED, "k": REQUIRED, "v": REQUIRED, "cu_seqlens_q": REQUIRED,
    "cu_seqlens_k": REQUIRED, "max_seqlen_q": REQUIRED, "max_seqlen_k": REQUIRED,
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    "block_table": None,
}  # fmt: skip
KVCACHE = {
    "q": REQUIRED, "k_cache": REQUIRED, "v_cache": REQUIRED, "k": None, "v": None,
    "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False,
    "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None,
    "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip


def starts(*lens: int) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def varlen(compat: ModuleType, **changes: Any) -> Any:
    """Sequences of 2 and 3 queries and of 4 and 3 keys, with changes."""
    arguments = {
        "q": torch.randn(5, 4, 24), "k": torch.randn(7, 2, 24), "v": torch.randn(7, 2, 24),
        "cu_seqlens_q": starts(2, 3), "cu_seqlens_k": starts(4, 3), "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }  # fmt: skip
    return compat.flash_attn_varlen_func(**arguments | changes)


def kvcache(compat: ModuleType, **changes: Any) -> Any:
    """Two rows of one query, 5 and 16 of 16 tokens, with changes."""
    arguments = {
        "q": torch.randn(2, 1, 4, 24), "k_cache": torch.randn(2, 16, 2, 24),
        "v_cache": torch.randn(2, 16, 2, 24),
        "cache_seqlens": torch.tensor([5, 16], dtype=torch.int32),
    }  # fmt: skip
    return compat.flash_attn_with_kvcache(**arguments | changes)


@pytest.mark.parametrize("name", ["own", "chosen"])
def test_signatures_are_flash_attns_own(compat: ModuleType, name: str) -> None:
    """Names, order and defaults of flash-attn 2, so that positional calls mean the same."""
    module = compat if name == "own" else nanovllm_flash_attn_compat
    for function, expected in (
        (module.flash_attn_varlen_func, VARLEN),
        (module.flash_attn_with_kvcache, KVCACHE),
    ):
        parameters = inspect.signature(function).parameters
        assert {name: p.default for name, p in parameters.items()} == expected
        assert list(parameters) == list(expected)


PAGED = {"k": torch.zeros(2, 16, 2, 24), "v": torch.zeros(2, 16, 2, 24)}
NEW = torch.zeros(2, 2, 2, 24)
TABLE = torch.zeros(16, 4)
STARTING = torch.tensor([5, 3], dtype=torch.int32)
APPENDED = {"k": NEW, "v": NEW, "cache_seqlens": STARTING}
ROTATED = APPENDED | {"rotary_cos": TABLE, "rotary_sin": TABLE}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0.1 .*pass 0.0"),
        ({"softcap": -1.0}, r"softcap=-1.0 .*0.0 is none"),
        ({"v": torch.zeros(7, 2, 24).half()}, "q, k, v=torch.float32, .*pass one dtype"),
        ({"v": torch.zeros(7, 2, 16)}, r"v=tensor \[7, 2, 16\] .*\[7, 2, 24\]"),
        ({"q": torch.zeros(5, 4, 16)}, r"q=head size 16 .*24"),
        (
            {"k": torch.zeros(7, 0, 24), "v": torch.zeros(7, 0, 24)},
            r"k=tensor \[7, 0, 24\] .*one head",
        ),
        ({"q": torch.zeros(5, 0, 24)}, r"q=tensor \[5, 0, 24\] .*one head"),
        ({"q": torch.zeros(1, 5, 4, 24)}, r"q=tensor .*\[tokens, heads, head size\]"),
        (
            {"k": torch.zeros(2, 16, 2, 24), "v": torch.zeros(2, 16, 2, 24)},
            "k=tensor .*tokens, KV heads, .*; blocks need a block_table",
        ),
        (
            {"block_table": torch.zeros(2, 1).int()},
            r"k=tensor \[7, 2, 24\] .*\[blocks, tokens, .*; packed keys have no block_table",
        ),
        ({"cu_seqlens_q": torch.zeros(0).int()}, r"cu_seqlens_q=tensor \[0\] .*sequences \+ 1"),
        ({"q": torch.zeros(5, 3, 24)}, "q=3 query and 2 KV heads .*whole number"),
        ({"max_seqlen_q": 2}, "cu_seqlens_q=3 .*0 to 2; raise max_seqlen_q"),
        ({"max_seqlen_k": 3}, "cu_seqlens_k=4 .*0 to 3; raise max_seqlen_k"),
        ({"cu_seqlens_q": starts(2, 4)}, "cu_seqlens_q=6 .*0 to 5"),
        ({"cu_seqlens_k": starts(4, 4)}, "cu_seqlens_k=8 .*0 to 7"),
        ({"cu_seqlens_k": starts(4, -1)}, "cu_seqlens_k=-1 "),
        ({"cu_seqlens_k": starts(7)}, r"cu_seqlens_k=tensor \[2\] .*needs shape \[3\]"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, r"alibi_slopes="),
        (PAGED | {"block_table": torch.zeros(1, 1).int()}, r"block_table=tensor .*\[2, blocks\]"),
        (PAGED | {"block_table": torch.zeros(2).int()}, r"block_table=tensor \[2\] .*, blocks\]"),
        (PAGED | {"block_table": torch.zeros(2, 1)}, "block_table=torch.float32 .*int32 or int64"),
        ({"cu_seqlens_k": starts(4, 3) + 0.5}, "cu_seqlens_k=torch.float32 .*int32 or int64"),
    ],
)
def test_varlen_refuses_by_name(compat: ModuleType, changed: dict[str, Any], message: str) -> None:
    """The parameter, its value, the limit and the remedy."""
    with pytest.raises(UnsupportedError, match=f"flash_attn_varlen_func: {message}"):
        varlen(compat, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache_leftpad": torch.zeros(2)}, r"cache_leftpad=tensor \[2\] .*pass None"),
        (
            {"cache_batch_idx": torch.zeros(2), "block_table": torch.zeros(2, 1)},
            "cache_batch_idx=.*block_table, not both",
        ),
        ({"k": NEW}, "k=.*pass k and v together"),
        ({"v": NEW}, "v=.*pass k and v together"),
        ({"k": NEW, "v": NEW, "cache_seqlens": None}, "cache_seqlens=None .*pass it"),
        ({"rotary_cos": TABLE}, "rotary_cos=.*rotary_cos and rotary_sin together"),
        ({"rotary_sin": TABLE}, "rotary_sin=.*rotary_cos and rotary_sin together"),
        ({"rotary_cos": TABLE, "rotary_sin": TABLE}, "rotary_cos=.*pass k and v"),
        ({"cache_seqlens": 17}, "cache_seqlens=17 .*0 to 16"),
        ({"cache_seqlens": torch.tensor([1, 17])}, "cache_seqlens=17 .*0 to 16"),
        ({"cache_seqlens": torch.tensor([-1, 1])}, "cache_seqlens=-1 .*0 to 16"),
        ({"cache_seqlens": torch.tensor([1])}, r"cache_seqlens=tensor \[1\] .*\[2\]"),
        ({"k": NEW, "v": NEW}, "cache_seqlens=16 .*0 to 14; .*the new keys"),
        ({"k": NEW, "v": NEW, "cache_seqlens": 15}, "cache_seqlens=15 .*0 to 14"),
        ({"k": NEW.repeat(1, 9, 1, 1), "v": NEW.repeat(1, 9, 1, 1)}, "k=18 tokens .*16"),
        ({"block_table": torch.tensor([[0], [2]])}, "block_table=2 .*0 to 1"),
        ({"block_table": torch.tensor([[0]])}, r"block_table=tensor \[1, 1\] .*\[2, blocks\]"),
        ({"cache_batch_idx": torch.tensor([0, 2])}, "cache_batch_idx=2 .*0 to 1"),
        ({"cache_batch_idx": torch.tensor([0.0, 1.9])}, "cache_batch_idx=torch.float32 .*int32"),
        ({"cache_seqlens": torch.tensor([5.0, 9.9])}, "cache_seqlens=torch.float32 .*int32"),
        ({"cache_seqlens": 9.9}, "cache_seqlens=9.9 .*int"),
        (
            {"k_cache": torch.zeros(2, 16, 0, 24), "v_cache": torch.zeros(2, 16, 0, 24)},
            r"k_cache=tensor \[2, 16, 0, 24\] .*one head",
        ),
        (
            {"q": torch.zeros(3, 1, 4, 24), "cache_seqlens": 5},
            "k_cache=2 rows .*q has 3; give the cache a row for each, or pass cache_batch_idx",
        ),
        (
            {
                "k": NEW, "v": NEW, "cache_seqlens": STARTING,
                "rotary_cos": TABLE[:6], "rotary_sin": TABLE[:6],
            },
            "rotary_cos=6 .*0 to 5; pass longer tables",
        ),
        (ROTATED | {"rotary_sin": TABLE[:9]}, r"rotary_sin=tensor \[9, 4\] .*\[16, 4\]"),
        (ROTATED | {"rotary_sin": TABLE[:, :1]}, r"rotary_sin=tensor \[16, 1\] .*\[16, 4\]"),
        (
            ROTATED | {"rotary_cos": TABLE[:0], "rotary_sin": TABLE[:0]},
            r"rotary_cos=tensor \[0, 4\] .*at least one position",
        ),
        (
            ROTATED | {"rotary_cos": TABLE.repeat(1, 4), "rotary_sin": TABLE.repeat(1, 4)},
            r"rotary_cos=tensor \[16, 16\] .*at most 12",
        ),
        (APPENDED | {"k": NEW[:1, :1, :1, :1]}, r"k=tensor \[1, 1, .*\[2, new tokens, 2, 24\]"),
        (APPENDED | {"v": NEW[:, :1]}, r"v=tensor \[2, 1, 2, 24\] .*\[2, 2, 2, 24\]"),
        (APPENDED | {"k": NEW.double()}, "k=torch.float64 .*the cache has torch.float32"),
        (APPENDED | {"v": NEW.half()}, "v=torch.float16 .*the cache has torch.float32"),
        ({"q": torch.zeros(2, 1, 4, 24, requires_grad=True)}, r".*torch\.no_grad"),
        ({"k": NEW.clone().requires_grad_(), "v": NEW, "cache_seqlens": 1}, r".*torch\.no_grad"),
    ],
)  # fmt: skip
def test_kvcache_refuses_by_name(compat: ModuleType, changed: dict[str, Any], message: str) -> None:
    """The parameter, its value, the limit and the remedy; nothing is written."""
    cache = torch.randn(2, 16, 2, 24)
    before = cache.clone()
    with pytest.raises(UnsupportedError, match=f"flash_attn_with_kvcache: {message}"):
        kvcache(compat, **{"k_cache": cache, "v_cache": cache.clone()} | changed)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["packed", "cached"])
@pytest.mark.parametrize("seed", range(8))
def test_a_tensor_of_another_rank_dtype_or_device_is_refused_by_its_name(
    compat: ModuleType, draw: Any, seed: int, name: str
) -> None:
    """Each tensor of a drawn call. Lengths of the cache alone may lie on another device."""
    function = {"packed": "flash_attn_varlen_func", "cached": "flash_attn_with_kvcache"}[name]
    alibi = "alibi_slopes" not in compat.BACKEND.lacks
    arguments = draw[name](seed, torch.float32, alibi=alibi).arguments
    for parameter, x in arguments.items():
        if not isinstance(x, Tensor):
            continue
        wrong = [x.new_zeros(()), x[None, None]]
        if not x.is_floating_point():
            wrong.append(x.float())
        if parameter not in ("q", "cache_seqlens"):
            wrong.append(x.to("meta"))
        for value in wrong:
            with pytest.raises(UnsupportedError, match=f"{function}: {parameter}="):
                getattr(compat, function)(**arguments | {parameter: value})


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 4), (1, 2, 4)])
def test_slopes_are_of_every_head_or_of_every_row_and_head(shape: tuple[int, ...]) -> None:
    """Of two rows and four heads."""
    sdpa = import_module("nanovllm_flash_attn_compat.sdpa")
    message = r"alibi_slopes=tensor .*\[4\] or \[2, 4\]"
    for call in (varlen, kvcache):
        with pytest.raises(UnsupportedError, match=message):
            call(sdpa, alibi_slopes=torch.ones(shape))


def test_a_block_that_no_token_uses_may_have_any_name(compat: ModuleType) -> None:
    """Tables are as wide as the longest row, and filled with anything."""
    table = torch.tensor([[1, -1, 2**30], [0, 9999, -7]], dtype=torch.int32)
    lens = torch.tensor([5, 16], dtype=torch.int32)
    cache = torch.randn(2, 16, 2, 24)
    assert kvcache(
        compat, k_cache=cache, v_cache=cache, block_table=table, cache_seqlens=lens
    ).isfinite().all()  # fmt: skip


TRITON = [
    ({"alibi_slopes": torch.ones(4)}, r"alibi_slopes=tensor \[4\] .*compat\.sdpa"),
    ({"q": torch.zeros(5, 4, 24, requires_grad=True)}, r"no_grad\(\).*compat\.sdpa"),
    (
        {
            "q": torch.zeros(5, 4, 257), "k": torch.zeros(7, 2, 257), "v": torch.zeros(7, 2, 257),
        },
        "q=head size 257 .*256; take .*compat.sdpa",
    ),
    (
        {
            "q": torch.zeros(5, 4, 24).double(), "k": torch.zeros(7, 2, 24).double(),
            "v": torch.zeros(7, 2, 24).double(),
        },
        "q=torch.float64 .*triton computes in",
    ),
    ({"softmax_scale": 0.0}, "varlen_func: softmax_scale=0.0 .*triton .*positive .*negate q"),
    ({"softmax_scale": -0.5}, "varlen_func: softmax_scale=-0.5 .*positive"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), TRITON)
def test_what_triton_lacks_is_refused_with_the_remedy(
    compat: ModuleType, changed: dict[str, Any], message: str
) -> None:
    """sdpa takes each of them."""
    if compat.BACKEND.name == "triton":
        with pytest.raises(UnsupportedError, match=message):
            varlen(compat, **changed)
    else:
        assert varlen(compat, **changed).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_splits": 4}, "num_splits=4 .*pass 0, or 1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes="),
        ({"softmax_scale": -0.5}, "softmax_scale=-0.5 .*triton .*positive .*negate q"),
        ({"v_cache": torch.zeros(16, 2, 2, 24).transpose(0, 1)}, r"v=strides .*k's strides"),
    ],
)
def test_what_tritons_cache_lacks_is_refused(
    compat: ModuleType, changed: dict[str, Any], message: str
) -> None:
    """sdpa takes each of them."""
    if compat.BACKEND.name == "triton":
        with pytest.raises(UnsupportedError, match=f"flash_attn_with_kvcache: {message}"):
            kvcache(compat, **changed)
    else:
        assert kvcache(compat, **changed).isfinite().all()


def test_gradients_of_blocks_are_refused(compat: ModuleType) -> None:
    """Packed keys have them on sdpa."""
    blocks = torch.zeros(2, 16, 2, 24)
    inputs = {"k": blocks, "v": blocks, "block_table": torch.tensor([[0], [1]], dtype=torch.int32)}
    with pytest.raises(UnsupportedError, match=r"q, k, v=.*no_grad\(\)"):
        varlen(compat, q=torch.zeros(5, 4, 24, requires_grad=True), **inputs)


def test_both_backends_offer_operators_of_the_same_signatures() -> None:
    """So that one call serves both; ALiBi is sdpa's alone."""
    for name in ("packed_attention", "paged_attention"):
        triton, sdpa = (
            inspect.signature(getattr(import_module(f"nanovllm_attention_{b}.operators"), name))
            for b in ("triton", "sdpa")
        )
        parameters = dict(sdpa.parameters)
        parameters.pop("alibi_slopes")
        assert parameters == dict(triton.parameters)
        assert triton.return_annotation == sdpa.return_annotation
