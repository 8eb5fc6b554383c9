"""The Triton kernels equal their torch references (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanovllm_core.api import KernelSet, QKPrep
from nanovllm_core.kernels import TorchKernels
from nanovllm_kernels_triton.kernel_set import TritonKernels
from nanovllm_kit.numerics import assert_close_report

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes bfloat16 wrongly, so it is tested on a GPU only.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
REL_NORM = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def make_prep(
    heads: tuple[int, int], head_size: int, rotary: int, dtype: torch.dtype, max_position: int = 64
) -> QKPrep:
    return QKPrep(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        cos_sin_cache=random(max_position, rotary, seed=7),
        q_norm_weight=random(head_size, dtype=dtype, seed=8),
        k_norm_weight=random(head_size, dtype=dtype, seed=9),
    )


def prepare(
    kernels: KernelSet, qkv_TX: Tensor, prep: QKPrep, positions: Tensor,
    slots: Tensor, caches: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    return kernels.prepare_qkv(qkv_TX, prep, positions, slots, *caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 96, 1024])
def test_rms_norm_equals_its_reference(size: int, dtype: torch.dtype) -> None:
    """Any row size, powers of two or not, and rows with a gap between them."""
    x_TE = random(3, 2 * size, dtype=dtype)[:, :size]
    weight_E = random(size, dtype=dtype, seed=1)
    actual = TritonKernels().rms_norm(x_TE, weight_E, 1e-6)
    expected = TorchKernels().rms_norm(x_TE, weight_E, 1e-6)
    assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])
    assert actual.dtype == dtype
    assert actual.is_contiguous()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embed_copies_rows(ids_dtype: torch.dtype) -> None:
    """The first and the last row, one of them twice, wider than one block."""
    weight = random(9, 1100, dtype=torch.float32)
    ids = torch.tensor([8, 0, 3, 8], dtype=ids_dtype, device=weight.device)
    actual = TritonKernels().embed(ids, weight)
    assert torch.equal(actual, TorchKernels().embed(ids, weight))
    assert torch.equal(actual, weight[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 1100])
def test_silu_and_mul_equals_its_reference(size: int, dtype: torch.dtype) -> None:
    """Sizes below and above one block."""
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    actual = TritonKernels().silu_and_mul(gate_up)
    assert_close_report(actual, TorchKernels().silu_and_mul(gate_up), rel_norm=REL_NORM[dtype])
    assert actual.dtype == dtype


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter is numpy; infinity is wanted
@pytest.mark.parametrize("gate", [-1e4, -100.0, 100.0, 1e4])
def test_silu_and_mul_stays_finite_for_large_gates(gate: float) -> None:
    """exp of a large number must not turn zero into NaN."""
    gate_up = torch.tensor([[gate, 2.0]], device=DEVICE)
    expected = torch.tensor([[max(gate, 0.0) * 2.0]])
    assert_close_report(TritonKernels().silu_and_mul(gate_up), expected, rel_norm=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_size", "rotary"),
    [
        ((4, 2), 64, 64),
        ((16, 8), 32, 32),
        ((12, 4), 16, 16),  # 12 heads: the last group of 8 is half empty
        ((2, 1), 80, 80),  # halves of 40: not a power of two
        ((4, 4), 64, 16),  # partial rotation
        ((1, 1), 48, 24),
    ],
)
@pytest.mark.parametrize("num_tokens", [5, 11])
def test_prepare_qkv_equals_its_reference(
    num_tokens: int, heads: tuple[int, int], head_size: int, rotary: int, dtype: torch.dtype
) -> None:
    """q, and every element of both caches, padded tokens included; by eight heads, and by two."""
    prep = make_prep(heads, head_size, rotary, dtype)
    qkv_TX = random(num_tokens, (heads[0] + 2 * heads[1]) * head_size, dtype=dtype)
    numbers = [0, 63, 5, 0, 17, 1, 30, 2, 8, 0, 62][:num_tokens]
    positions = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 11, 4, -1, 0, 1, 2, 5, -1, 7, 8][:num_tokens], device=DEVICE)
    results = []
    for kernels in (TritonKernels(), TorchKernels()):
        shape = (3, 4, heads[1], head_size)
        caches = (torch.full(shape, 9.0, dtype=dtype, device=DEVICE), random(*shape, dtype=dtype))
        q = prepare(kernels, qkv_TX, prep, positions, slots, caches)
        assert q.shape == (num_tokens, heads[0], head_size)
        assert q.is_contiguous()
        results.append((q, *caches))
    for actual, expected in zip(*results, strict=True):
        assert_close_report(actual, expected, rel_norm=REL_NORM[dtype])


def test_a_padded_token_writes_nothing() -> None:
    """Slot -1 leaves both caches bit for bit as they were (bug 9 of the peers)."""
    prep = make_prep((4, 2), 16, 16, torch.float32)
    caches = (random(2, 4, 2, 16, seed=3), random(2, 4, 2, 16, seed=4))
    before = [cache.clone() for cache in caches]
    positions = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    slots = torch.full((3,), -1, device=DEVICE)
    prepare(TritonKernels(), random(3, 8 * 16), prep, positions, slots, caches)
    for cache, copy in zip(caches, before, strict=True):
        assert torch.equal(cache, copy)


def test_values_reach_their_slot_unchanged_through_strided_caches() -> None:
    """Caches that are views of one buffer [N, 2, K, P, D] are written through their strides."""
    prep = make_prep((2, 2), 16, 16, torch.float32)
    buffer = torch.zeros(3, 2, 2, 4, 16, device=DEVICE)
    k_cache, v_cache = (buffer[:, i].transpose(1, 2) for i in (0, 1))
    qkv_TX = random(2, 6 * 16)
    slots = torch.tensor([10, 1], device=DEVICE)
    positions = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    prepare(TritonKernels(), qkv_TX, prep, positions, slots, (k_cache, v_cache))
    v_TKD = qkv_TX.view(2, 6, 16)[:, 4:]
    assert torch.equal(v_cache[2, 2], v_TKD[0])
    assert torch.equal(v_cache[0, 1], v_TKD[1])
    assert int((buffer[:, 1].abs().sum(-1) > 0).sum()) == 4
    assert int((buffer[:, 0].abs().sum(-1) > 0).sum()) == 4


@pytest.mark.parametrize("kept", ["q", "k", "neither"])
def test_a_missing_norm_weight_means_no_norm(kept: str) -> None:
    """q and k are independent of each other in this."""
    prep = make_prep((2, 2), 16, 16, torch.float32)
    if kept != "q":
        prep = replace(prep, q_norm_weight=None)
    if kept != "k":
        prep = replace(prep, k_norm_weight=None)
    qkv_TX, slots = random(2, 6 * 16) * 3, torch.tensor([0, 1], device=DEVICE)
    results = []
    for kernels in (TritonKernels(), TorchKernels()):
        caches = (torch.zeros(1, 4, 2, 16, device=DEVICE), torch.zeros(1, 4, 2, 16, device=DEVICE))
        q = prepare(kernels, qkv_TX, prep, torch.arange(2, device=DEVICE), slots, caches)
        results.append((q, caches[0]))
    for actual, expected in zip(*results, strict=True):
        assert_close_report(actual, expected, rel_norm=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_blocks_beyond_two_billion_elements_are_written() -> None:
    """Offsets are 64-bit: the last block of a cache of 2^31 elements and more."""
    prep = make_prep((16, 8), 128, 128, torch.float16)
    num_blocks = 2**31 // (256 * 8 * 128) + 2
    caches = tuple(
        torch.zeros(num_blocks, 256, 8, 128, dtype=torch.float16, device=DEVICE) for _ in range(2)
    )
    qkv_TX = random(1, 32 * 128, dtype=torch.float16)
    slots = torch.tensor([num_blocks * 256 - 1], device=DEVICE)
    positions = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    prepare(TritonKernels(), qkv_TX, prep, positions, slots, (caches[0], caches[1]))
    assert torch.equal(caches[1][-1, -1], qkv_TX.view(32, 128)[24:])
    assert int((caches[1] != 0).sum()) <= 8 * 128
