"""The conformance suite of kernel sets: every operation against the torch reference.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, QKPrep
from nanovllm_core.interfaces.specs import KernelSetSpec
from nanovllm_core.kernels.reference import TorchKernels
from nanovllm_core.testing.conformance import PluginUnderTest, SpecConformance
from nanovllm_core.testing.numerics import assert_close_report

REL_NORM = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""How far a result may be from the reference, by dtype: another order of the sums."""
REFERENCE = TorchKernels()
PAGES, PAGE = 6, 4


class KernelSetConformance(SpecConformance):
    """Each operation equals the reference, with gaps between rows and padding among them."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    """What the set computes in; Triton's interpreter cannot do bfloat16."""

    @pytest.fixture(params=["cpu", "cuda"])
    def device(self, plugin: PluginUnderTest, request: pytest.FixtureRequest) -> torch.device:
        """Each device that the plugin declares and this machine has."""
        assert isinstance(plugin.spec, KernelSetSpec)
        if request.param not in plugin.spec.devices:
            pytest.skip(f"{plugin.spec.name} does not declare {request.param}")
        if request.param == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        return torch.device(request.param)

    @pytest.fixture
    def kernels(self, plugin: PluginUnderTest, device: torch.device) -> KernelSet:
        """The set, made as the worker makes it."""
        made: KernelSet = plugin.load()(plugin.options, device)
        return made

    @pytest.fixture(params=["float32", "float16", "bfloat16"])
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        """Each dtype of a model."""
        dtype: torch.dtype = getattr(torch, request.param)
        if dtype not in self.dtypes:
            pytest.skip(f"the suite does not ask for {request.param}")
        return dtype

    def test_it_has_every_operation_and_a_name(self, kernels: KernelSet) -> None:
        """The protocol, and what listings and benchmarks call the set."""
        assert isinstance(kernels, KernelSet)
        assert kernels.name

    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
    def test_embed_copies_rows(
        self, kernels: KernelSet, device: torch.device, ids_dtype: torch.dtype
    ) -> None:
        """The first and the last, one of them twice, of a width that is no power of two."""
        weight_VE = random(9, 1100, device=device)
        ids_T = torch.tensor([8, 0, 3, 8], dtype=ids_dtype, device=device)
        assert torch.equal(kernels.embed(ids_T, weight_VE), weight_VE[ids_T.long()])

    @pytest.mark.parametrize("rows", [1, 3])
    @pytest.mark.parametrize("size", [16, 96, 1024])
    def test_rms_norm_equals_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, size: int, rows: int
    ) -> None:
        """With gaps between the rows; epsilon counts where a row is small."""
        x_TE = random(rows, 2 * size, device=device, dtype=dtype)[:, :size] * 0.03
        weight_E = random(size, device=device, dtype=dtype, seed=1)
        expected = REFERENCE.rms_norm(x_TE, weight_E, 1e-3)
        assert_equal(kernels.rms_norm(x_TE, weight_E, 1e-3), expected)

    @pytest.mark.parametrize("size", [16, 1100])
    def test_silu_and_mul_equals_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, size: int
    ) -> None:
        """The gate is the first half."""
        gate_up_T2F = random(3, 2 * size, device=device, dtype=dtype) * 4
        expected = REFERENCE.silu_and_mul(gate_up_T2F)
        assert_equal(kernels.silu_and_mul(gate_up_T2F), expected)

    @pytest.mark.filterwarnings("ignore:overflow")
    def test_silu_and_mul_stays_finite(self, kernels: KernelSet, device: torch.device) -> None:
        """The exponential of a large gate overflows; the result does not."""
        gates = [-1e4, -100.0, 100.0, 1e4]
        gate_up_T2F = torch.tensor([[gate, 2.0] for gate in gates], device=device)
        expected = torch.tensor([[max(gate, 0.0) * 2.0] for gate in gates])
        assert_close_report(kernels.silu_and_mul(gate_up_T2F), expected, rel_norm=1e-6)

    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_products_equal_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Alone, after a norm, and with the gated activation behind it."""
        x_TE = random(rows, 64, device=device, dtype=dtype)
        weight_XE = random(48, 64, device=device, dtype=dtype, seed=1) * 0.1
        norm_E = random(64, device=device, dtype=dtype, seed=2)
        assert_equal(kernels.linear(x_TE, weight_XE), REFERENCE.linear(x_TE, weight_XE))
        for name in ("norm_linear", "norm_gate_up"):
            arguments = (x_TE, norm_E, 1e-2, weight_XE)
            before = x_TE.clone()
            assert_equal(getattr(kernels, name)(*arguments), getattr(REFERENCE, name)(*arguments))
            assert torch.equal(x_TE, before), f"{name} changed its input"

    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_linear_writes_where_it_is_told(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """The logits of all captured graphs share one buffer."""
        x_TE = random(rows, 64, device=device, dtype=dtype)
        weight_XE = random(48, 64, device=device, dtype=dtype, seed=1)
        out_TX = torch.full((rows + 1, 48), float("nan"), device=device, dtype=dtype)
        kernels.linear(x_TE, weight_XE, out_TX[:rows])
        assert_equal(out_TX[:rows], REFERENCE.linear(x_TE, weight_XE))
        assert out_TX[rows].isnan().all(), "it wrote behind its rows"

    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_linear_add_adds_to_the_residual(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """What is returned is residual + x W^T, once."""
        x_TF = random(rows, 96, device=device, dtype=dtype)
        weight_EF = random(64, 96, device=device, dtype=dtype, seed=1) * 0.1
        residual_TE = random(rows, 64, device=device, dtype=dtype, seed=2)
        expected = REFERENCE.linear_add(x_TF, weight_EF, residual_TE.clone())
        assert_equal(kernels.linear_add(x_TF, weight_EF, residual_TE), expected)

    @pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)], ids=str)
    @pytest.mark.parametrize("variant", ["norm and rotation", "no norm", "half rotated"])
    def test_qkv_is_prepared_as_by_the_reference(
        self,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        heads: tuple[int, int],
        variant: str,
    ) -> None:
        """q, and what lies in the pages: k normed and rotated, v as it is."""
        prep = make_prep(heads, device, dtype, rotary=16 if variant == "half rotated" else 32)
        if variant == "no norm":
            prep = replace(prep, q_norm_weight=None, k_norm_weight=None)
        check_prepare(kernels, prep, device, dtype, slots=[9, 2, 23, 0, 14])

    def test_a_slot_of_minus_one_stores_nothing(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A padded row of a graph writes to no page, least of all to the first or last slot."""
        prep = make_prep((4, 2), device, dtype)
        check_prepare(kernels, prep, device, dtype, slots=[-1, 5, -1, 6, -1])
        check_prepare(kernels, prep, device, dtype, slots=[-1] * 5)

    def test_pages_may_lie_apart(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Caches that are slices of a larger tensor, in an order of their own; strides decide."""
        prep = make_prep((4, 2), device, dtype)
        check_prepare(kernels, prep, device, dtype, slots=[9, 2, 23, 0, 14], strided=True)

    @pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64], ids=str)
    def test_positions_may_be_32_or_64_bits_wide(
        self, kernels: KernelSet, device: torch.device, positions_dtype: torch.dtype
    ) -> None:
        """The values do not depend on it."""
        prep = make_prep((4, 2), device, torch.float32)
        check_prepare(
            kernels, prep, device, torch.float32, slots=[1, 2, 3, 4, 5], positions=positions_dtype
        )

    def test_equal_inputs_give_equal_bits(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Called twice; so a replayed step repeats itself."""
        x_TE = random(5, 64, device=device, dtype=dtype)
        weight_XE = random(48, 64, device=device, dtype=dtype, seed=1)
        norm_E = random(64, device=device, dtype=dtype, seed=2)
        for name in ("norm_linear", "norm_gate_up"):
            first, second = (
                getattr(kernels, name)(x_TE, norm_E, 1e-6, weight_XE).clone() for _ in range(2)
            )
            assert torch.equal(first, second), name


def random(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Of one dtype, and equal up to the order of the sums."""
    assert actual.dtype == expected.dtype
    assert_close_report(actual, expected, rel_norm=REL_NORM[expected.dtype])


def make_prep(
    heads: tuple[int, int], device: torch.device, dtype: torch.dtype, *, rotary: int = 32
) -> QKPrep:
    """Heads of 32 with norms, an epsilon that counts, and a rotation table of 64 positions."""
    return QKPrep(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=32,
        cos_sin_cache=random(64, rotary, device=device, seed=7),
        q_norm_weight=random(32, device=device, dtype=dtype, seed=8),
        k_norm_weight=random(32, device=device, dtype=dtype, seed=9),
        eps=1e-2,
    )


def check_prepare(
    kernels: KernelSet,
    prep: QKPrep,
    device: torch.device,
    dtype: torch.dtype,
    *,
    slots: list[int],
    strided: bool = False,
    positions: torch.dtype = torch.int32,
) -> None:
    """Both sets on equal inputs: equal q, and equal caches, also where nothing was stored."""
    width = (prep.num_heads + 2 * prep.num_kv_heads) * prep.head_size
    qkv_TX = random(len(slots), width, device=device, dtype=dtype)
    positions_T = torch.tensor([63, 0, 7, 31, 7], dtype=positions, device=device)
    slots_T = torch.tensor(slots, device=device)
    results: list[Any] = []
    for one in (kernels, REFERENCE):
        shape = (PAGES, PAGE, prep.num_kv_heads, prep.head_size)
        if strided:
            # [K, 2, N, P, 2D] seen as [N, P, K, D]: nothing is contiguous but the last dimension.
            wide = torch.full(
                (shape[2], 2, shape[0], shape[1], 2 * shape[3]), 5.0, device=device, dtype=dtype
            )
            both = wide[..., : shape[3]].permute(1, 2, 3, 0, 4)
        else:
            both = wide = torch.full((2, *shape), 5.0, device=device, dtype=dtype)
        q_THD = one.prepare_qkv(qkv_TX.clone(), prep, positions_T, slots_T, both[0], both[1])
        results.append((q_THD, wide))
    (q_THD, pages), (expected_q_THD, expected_pages) = results
    assert q_THD.shape == (len(slots), prep.num_heads, prep.head_size)
    assert q_THD.is_contiguous()
    assert_equal(q_THD, expected_q_THD)
    assert_equal(pages, expected_pages)
    untouched = expected_pages == 5.0
    assert (pages[untouched] == 5.0).all(), "it wrote where nothing belongs"
