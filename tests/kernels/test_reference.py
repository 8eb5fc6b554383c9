"""The torch reference: what the suite of kernel sets cannot say of it, being made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from nanovllm_core.api import QKPrep
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.kernels.reference import store_unless_padded
from nanovllm_kit.kernel_experts import ExpertChecks
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.recording import record


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_prep(heads: tuple[int, int], head_size: int) -> QKPrep:
    return QKPrep(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        cos_sin_cache=random(64, head_size, seed=7),
        q_norm_weight=random(head_size, seed=8),
        k_norm_weight=random(head_size, seed=9),
    )


def test_the_rotation_is_the_one_of_complex_numbers() -> None:
    """Dimension d and d + D/2 are the parts of one number, multiplied by cos + i sin."""
    prep = make_prep((1, 1), 8)
    prep = replace(prep, q_norm_weight=None, k_norm_weight=None)
    qkv_TX = random(1, 24)
    caches = (torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8))
    q = TorchKernels().prepare_qkv(qkv_TX, prep, torch.tensor([5]), torch.tensor([0]), *caches)
    cos, sin = prep.cos_sin_cache[5].chunk(2)
    low, high = qkv_TX[0, :8].chunk(2)
    expected = torch.complex(low, high) * torch.complex(cos, sin)
    assert_close_report(q[0, 0], torch.cat((expected.real, expected.imag)), rel_norm=1e-6)


def test_a_padded_token_writes_nothing() -> None:
    """Slot -1 leaves both caches bit for bit as they were, of some tokens and of all."""
    prep = make_prep((4, 2), 16)
    qkv_TX, positions = random(5, 8 * 16), torch.zeros(5, dtype=torch.int32)
    for slots in ([-1, 5, -1, 6, 0], [-1] * 5):
        caches = (random(2, 4, 2, 16, seed=3), random(2, 4, 2, 16, seed=4))
        before = [cache.clone() for cache in caches]
        TorchKernels().prepare_qkv(qkv_TX, prep, positions, torch.tensor(slots), *caches)
        written = [slot for slot in slots if slot >= 0]
        for cache, copy in zip(caches, before, strict=True):
            changed = (cache != copy).flatten(2).any(-1).flatten()
            assert changed.nonzero().flatten().tolist() == sorted(written)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_padding_is_read_on_the_device_alone(data: st.DataObject) -> None:
    """A captured step stores by the slots of the replay, not by those that were recorded."""
    drawn = st.lists(st.integers(0, 7), min_size=3, max_size=3, unique=True)
    slots_T, recorded, before = (
        torch.tensor(data.draw(drawn)),
        random(3, 2, 16),
        random(2, 4, 2, 16),
    )
    cache = before.clone()
    with record() as recording:
        store_unless_padded(recorded, slots_T, cache)
    padded = data.draw(st.sets(st.integers(0, 2)))
    slots = [-1 if i in padded else slot for i, slot in enumerate(data.draw(drawn))]
    slots_T.copy_(torch.tensor(slots))
    cache.copy_(before)
    recording.replay()
    expected = before.flatten(0, 1).clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = recorded[token]
    assert torch.equal(cache.flatten(0, 1), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_reference_can_be_captured() -> None:
    """Where no other set is installed, it serves a GPU, in graphs as elsewhere."""
    prep = make_prep((4, 2), 16)
    for field in ("cos_sin_cache", "q_norm_weight", "k_norm_weight"):
        prep = replace(prep, **{field: getattr(prep, field).cuda()})
    qkv_TX, positions = random(3, 8 * 16).cuda(), torch.zeros(3, dtype=torch.int32).cuda()
    slots_T = torch.tensor([-1, 2, 7]).cuda()
    caches = torch.zeros(2, 2, 4, 2, 16).cuda()
    TorchKernels().prepare_qkv(qkv_TX, prep, positions, slots_T, *caches)  # loads torch's kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        TorchKernels().prepare_qkv(qkv_TX, prep, positions, slots_T, *caches)
    for slots in ([4, -1, 1], [-1, -1, -1]):
        slots_T.copy_(torch.tensor(slots))
        caches.zero_()
        graph.replay()
        written = caches.flatten(3).any(-1).flatten(1).cpu()
        for cache in written:
            assert cache.nonzero().flatten().tolist() == sorted(slot for slot in slots if slot >= 0)


def test_a_set_derived_from_torchs_replaces_an_operation_in_the_fused_ones_too() -> None:
    """As its docstring says: `norm_linear` and `norm_gate_up` are made of the others."""

    class Doubled(TorchKernels):
        def linear(
            self,
            x_TE: Tensor,
            weight_XE: Tensor,
            bias_X: Tensor | None = None,
            out_TX: Tensor | None = None,
        ) -> Tensor:
            return 2 * super().linear(x_TE, weight_XE, bias_X, out_TX)

    x, norm, weight = torch.randn(3, 8), torch.rand(8), torch.randn(12, 8)
    plain, doubled = TorchKernels(), Doubled()
    product = 2 * plain.norm_linear(x, norm, 1e-6, weight)
    assert torch.equal(doubled.norm_linear(x, norm, 1e-6, weight), product)
    assert torch.equal(doubled.norm_gate_up(x, norm, 1e-6, weight), plain.silu_and_mul(product))


class TestExpertsWithoutWaiting(ExpertChecks):
    """The form of `experts` that can be captured, on a CPU too."""

    @pytest.fixture
    def kernels(self) -> TorchKernels:
        return TorchKernels()  # without a device: no operation reads ids on the host

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")

    @pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        dtype: torch.dtype = request.param
        return dtype
