"""Packed keys and values of each head, interpreted, against float64."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_attention_triton import hopper_packed, packed
from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.packed import packed_prefill
from nanovllm_attention_triton.packed_kernels import packed_kernel
from nanovllm_attention_triton.prefill_tuning import PackedTuning, packed_tuning
from nanovllm_core.api import PackedMetadata, UnsupportedError
from nanovllm_kit.latent_attention import LatentSizes, PackedCase, make_packed_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels compile for the GPU there; see test_gpu_latent.py"
)


def packed_batch(
    query_lens: list[int], key_lens: list[int], heads: int, sizes: tuple[int, int],
    dtype: torch.dtype, seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [T, H, D], k [L, H, D], v [L, H, V], whose other heads, behind those used, are NaN."""
    generator = torch.Generator().manual_seed(seed)
    (key_size, value_size), (queries, keys) = sizes, (sum(query_lens), sum(key_lens))
    q = torch.randn(queries, heads, key_size, generator=generator).to(dtype)
    k, v = (torch.full((keys, heads + 1, size), float("nan"), dtype=dtype) for size in sizes)
    k[:, :heads] = torch.randn(keys, heads, key_size, generator=generator).to(dtype)
    v[:, :heads] = torch.randn(keys, heads, value_size, generator=generator).to(dtype)
    return q, k[:, :heads], v[:, :heads]


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One sequence in float64: output [Q, H, V] and log-sum-exp [H, Q]; no key: 0 and -inf."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q))
        scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hqk,khv->qhv", scores.softmax(-1).nan_to_num(0.0), v.double())
    return out, scores.logsumexp(-1)


def starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def run(
    q: Tensor, k: Tensor, v: Tensor, query_lens: list[int], key_lens: list[int], scale: float,
    causal: bool, tuning: PackedTuning,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], len(q)), float("nan"))
    packed_prefill(
        q, k, v, starts(query_lens), starts(key_lens), max(query_lens), scale, causal, out,
        tuning, lse,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("number", range(8))
def test_packed_attention_equals_the_reference(number):
    """Drawn lengths, heads, key and value sizes; causal and not; queries without keys."""
    draws = Random(number)
    heads = draws.choice((1, 3, 5))
    sizes = draws.choice(((24, 16), (48, 32), (17, 40), (16, 5), (8, 8)))
    dtype = draws.choice((torch.float32, torch.float16))
    lens = [0, 1, 31, 32, 33, 64, draws.randint(65, 100)]
    query_lens, key_lens = draws.choices(lens, k=4), draws.choices(lens, k=4)
    if number % 2:
        key_lens = [q + draws.choice((0, 3, 40)) for q in query_lens]
    query_lens.append(1)  # A batch has a query.
    key_lens.append(2)
    q, k, v = packed_batch(query_lens, key_lens, heads, sizes, dtype, number)
    causal, scale = number % 4 < 2, sizes[0] ** -0.5
    tuning = packed_tuning(dtype.itemsize, *sizes, large=number % 3 > 0)
    out, lse = run(q, k, v, query_lens, key_lens, scale, causal, tuning)
    one_by_one = zip(q.split(query_lens), k.split(key_lens), v.split(key_lens), strict=True)
    right = [exact(*tensors, scale, causal) for tensors in one_by_one]
    limit = 2e-6 if dtype is torch.float32 else 2e-3
    expected = torch.cat([out for out, _ in right])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=limit)
    expected = torch.cat([lse for _, lse in right], 1)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=max(limit, 1e-5))


def test_parts_of_a_context_merge_to_the_whole():
    """By their log-sum-exps: a chunk's own keys, and two parts of what lies before it."""
    q, k, v = packed_batch([20], [70], 2, (24, 16), torch.float32, 0)
    tuning = packed_tuning(4, 24, 16, large=True)
    whole, whole_lse = run(q, k, v, [20], [70], 0.2, True, tuning)
    parts = [
        run(q, k[a:b], v[a:b], [20], [b - a], 0.2, causal, tuning)
        for a, b, causal in ((50, 70, True), (0, 33, False), (33, 50, False))
    ]
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total).exp().transpose(1, 2)[..., None]
    merged = (torch.stack([out for out, _ in parts]) * weights).sum(0)
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, whole_lse, atol=1e-5, rtol=1e-5)


def test_a_scale_that_is_not_positive_is_refused():
    q, k, v = packed_batch([4], [4], 1, (16, 16), torch.float32, 0)
    with pytest.raises(UnsupportedError, match="positive"):
        run(q, k, v, [4], [4], 0.0, True, packed_tuning(4, 16, 16, large=True))


def test_numbers_that_change_with_a_step_s_tokens_compile_no_other_kernel(monkeypatch):
    """Triton compiles anew for an integer that is 1, or that 16 divides, unless it is told not to.

    The start compiles for one step alone; a request would wait for the others.
    """
    launches: list[tuple[Any, ...]] = []

    class Recorder:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            return lambda *values, **_constants: launches.append(values)

    monkeypatch.setattr(packed, "packed_kernel", Recorder())
    tuning = packed_tuning(4, 16, 16, large=True)
    for lens in ([16, 16], [1], [7, 2, 5]):
        q, k, v = packed_batch(lens, lens, 2, (16, 16), torch.float32, 0)
        run(q, k, v, lens, lens, 0.2, True, tuning)
    changing = {
        name
        for name, values in zip(packed_kernel.arg_names, zip(*launches, strict=True), strict=False)
        if all(isinstance(value, int) for value in values) and len(set(values)) > 1
    }
    assert changing == {"num_seqs", "lse_stride_head"}
    assert changing <= set(packed_kernel.kwargs["do_not_specialize"])


@pytest.fixture
def launches(monkeypatch) -> dict[str, int]:
    """How often each kernel is launched; neither computes."""
    counts = {"hopper": 0, "plain": 0}

    def count(kind: str) -> None:
        counts[kind] += 1

    monkeypatch.setattr(hopper_packed, "on_hopper", lambda _device: True)
    monkeypatch.setattr(packed, "run_hopper_packed", lambda *_: count("hopper"))
    plain = defaultdict(lambda: lambda *_, **__: count("plain"))
    monkeypatch.setattr(packed, "packed_kernel", plain)
    return counts


def backend_of(case: PackedCase) -> tuple[TritonAttention, PackedMetadata]:
    """With the call's plan."""
    backend, metadata = TritonAttention(TritonOptions(), case.config()), case.metadata()
    backend.allocate()
    backend.plan_packed(metadata)
    return backend, metadata


@pytest.mark.parametrize(
    ("changes", "serves", "runs"),
    [
        ({}, True, True),
        ({"num_heads": 1}, True, False),
        ({"lens": [100, 20]}, True, False),
        ({"dtype": torch.bfloat16}, True, True),
        ({"dtype": torch.float32}, False, False),
        ({"sizes": LatentSizes(rotated=32)}, False, False),
        ({"sizes": LatentSizes(value=64)}, False, False),
        ({"triton": "3.8.0"}, False, False),
    ],
    ids=str,
)
def test_the_hopper_kernel_runs_where_it_serves_and_gains(
    monkeypatch, launches, changes, serves, runs
):
    """By dtype, sizes and Triton, as `describe` says, and from so many scores on."""
    given: dict[str, Any] = {"num_heads": 2, "dtype": torch.float16} | changes
    lens, sizes = given.pop("lens", [200]), given.pop("sizes", LatentSizes())
    version = given.pop("triton", "3.7.1")
    monkeypatch.setattr(hopper_packed, "triton", SimpleNamespace(__version__=version))
    case = make_packed_case(lens, lens, sizes, causal=True, **given)
    monkeypatch.setattr(packed, "HOPPER_SCORES", 2 * 200 * 205)  # 205: a bound of the 200 keys
    backend, metadata = backend_of(case)
    assert ("by warp roles" in backend.describe()) == serves
    case.run(backend, metadata, with_lse=False)  # the first one tries all kernels
    launches.update(dict.fromkeys(launches, 0))
    case.run(backend, metadata, with_lse=False)
    assert launches == {"hopper": int(runs), "plain": int(not runs)}
    if runs:  # rows that do not begin on 16 bytes are left to the other one
        odd = case.q_THD.new_empty(case.q_THD.numel() + 1)[1:].view_as(case.q_THD)
        replace(case, q_THD=odd).run(backend, metadata, with_lse=False)
        assert launches == {"hopper": 1, "plain": 1}


@pytest.mark.parametrize("scores", [0, 2**40])
def test_the_first_call_of_each_kind_has_both_kernels_compiled(monkeypatch, launches, scores):
    """However long the start's trial is; no later call does, of a step of any length."""
    monkeypatch.setattr(packed, "HOPPER_SCORES", scores)
    for causal, with_lse in ((True, False), (True, True), (False, True)):
        launches.update(dict.fromkeys(launches, 0))
        case = make_packed_case(
            [40], [40], LatentSizes(), num_heads=2, causal=causal, dtype=torch.float16
        )
        if causal and not with_lse:
            backend, _ = backend_of(case)
        metadata = case.metadata()
        backend.plan_packed(metadata)
        case.run(backend, metadata, with_lse=with_lse)
        assert launches == ({"hopper": 2, "plain": 1} if scores == 0 else {"hopper": 1, "plain": 2})
        case.run(backend, metadata, with_lse=with_lse)
        assert sum(launches.values()) == 4


def test_without_any_key_the_plain_kernel_serves(monkeypatch, launches):
    """The copy engine describes no empty tensor."""
    monkeypatch.setattr(packed, "HOPPER_SCORES", 0)
    case = make_packed_case(
        [5, 3], [0, 0], LatentSizes(), num_heads=2, causal=False, dtype=torch.float16
    )
    backend, metadata = backend_of(case)
    case.run(backend, metadata, with_lse=True)
    assert launches == {"hopper": 0, "plain": 3}


def test_numbers_that_change_compile_no_other_hopper_kernel():
    """As above: those of a step, and the heads of a rank."""
    module = import_module("nanovllm_attention_triton.hopper_packed_kernel")
    kernel = module.hopper_packed_kernel
    changing = {"num_seqs", "num_row_blocks", "num_heads", "lse_stride_head"}
    assert changing <= set(kernel.do_not_specialize)
