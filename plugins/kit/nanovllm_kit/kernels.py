"""The conformance suite of kernel sets: every operation against the torch reference.

Shape suffixes as in `nanovllm_core.interfaces.kernels`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import AdaptingKernels, GatedKernels, KernelSet, QKPrep
from nanovllm_core.interfaces.specs import KernelSetSpec
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.kernel_calls import REFERENCE, assert_equal, random, run
from nanovllm_kit.kernel_experts import ExpertChecks
from nanovllm_kit.kernel_large import LargeStateChecks
from nanovllm_kit.kernel_latent import LatentChecks
from nanovllm_kit.kernel_mixture import MixtureChecks
from nanovllm_kit.kernel_norming import NormingChecks
from nanovllm_kit.kernel_post_norm import PostNormChecks
from nanovllm_kit.kernel_routing import RoutingChecks
from nanovllm_kit.numerics import assert_close_report

BLOCK_SIZE, UNUSED, PREPARED_ROWS = 4, 5.0, 4
UNROUNDED = 2e-5
"""How far sums in float32 may be from exact ones: a fifteenth of what rounding to float16 adds."""

# Beyond any table of small sizes: decode batches have hundreds of rows, prompts thousands.
ROW_SHAPES = [(1, 16), (3, 96), (1, 1024), (17, 1100), (129, 1100), (513, 96)]
"""(rows, size), powers of two or not."""
Shape = tuple[int, int, int]
FEW = [(rows, 64, 48) for rows in (1, 2, 5)]
PRODUCT_SHAPES = [*FEW, (17, 1100, 200), (129, 1100, 200), (513, 64, 48)]
"""(rows, inputs, outputs), in whole tiles or not."""


class KernelSetConformance(
    LatentChecks,
    ExpertChecks,
    RoutingChecks,
    MixtureChecks,
    NormingChecks,
    PostNormChecks,
    LargeStateChecks,
    SpecConformance,
):
    """Each operation equals the reference, with gaps between rows and padding among them."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    """What is asked of the declared ones; Triton's interpreter cannot do bfloat16."""

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
        """The set, made as the worker makes it.

        It is told of more prepared rows than some of the tests have, and of fewer than others.
        """
        made: KernelSet = plugin.load()(plugin.options, device)
        if isinstance(made, AdaptingKernels):
            made.announce_prepared_decode(PREPARED_ROWS)
        return made

    @pytest.fixture(params=["float32", "float16", "bfloat16"])
    def dtype(self, plugin: PluginUnderTest, request: pytest.FixtureRequest) -> torch.dtype:
        """Each dtype of a model that the plugin declares."""
        dtype: torch.dtype = getattr(torch, request.param)
        assert isinstance(plugin.spec, KernelSetSpec)
        if request.param not in plugin.spec.dtypes:
            pytest.skip(f"{plugin.spec.name} does not declare {request.param}")
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
        """The first and the last, one id alone and many, of a width that is no power of two.

        What they are copied to becomes the residual, to which layers add: it is not the weight.
        """
        weight_VE = random(9, 1100, device=device)
        for ids in ([8, 0, 3, 8], [8], [4, 7, 1] * 43):
            ids_T = torch.tensor(ids, dtype=ids_dtype, device=device)
            assert torch.equal(run(kernels, "embed", ids_T, weight_VE), weight_VE[ids_T.long()])

    @pytest.mark.parametrize(("rows", "size"), ROW_SHAPES)
    def test_rms_norm_equals_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int, size: int
    ) -> None:
        """With gaps between the rows; epsilon counts where a row is small."""
        x_TE = (random(rows, 2 * size, device=device, dtype=dtype) * 0.03)[:, :size]
        weight_E = random(size, device=device, dtype=dtype, seed=1)
        expected = REFERENCE.rms_norm(x_TE, weight_E, 1e-3)
        assert_equal(run(kernels, "rms_norm", x_TE, weight_E, 1e-3), expected)

    def test_rms_norm_is_computed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Of residuals in the thousands, whose squares overflow float16 and are coarse in bfloat16.

        A weight of ones rounds nothing, so that what is left is the order of the sums.
        """
        x_TE = random(17, 1100, device=device, dtype=dtype) * 1000
        weight_E = torch.ones_like(x_TE[0])
        expected = REFERENCE.rms_norm(x_TE, weight_E, 1e-6)
        actual = run(kernels, "rms_norm", x_TE, weight_E, 1e-6)
        assert_close_report(actual, expected, rel_norm=max(torch.finfo(dtype).eps / 8, 3e-6))

    @pytest.mark.parametrize("rows", [1, 2, 5, 40, 150])
    def test_a_norm_with_a_float32_weight_rounds_once(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Alone and before a product, here by the identity, which rounds nothing itself."""
        x_TE = random(rows, 64, device=device, dtype=dtype)
        norm_E = random(64, device=device, seed=1)
        identity_EE = torch.eye(64, device=device, dtype=dtype)
        for name, arguments in {
            "rms_norm": (x_TE, norm_E, 1e-2),
            "norm_linear": (x_TE, norm_E, 1e-2, identity_EE),
            "norm_gate_up": (x_TE, norm_E, 1e-2, identity_EE.repeat(2, 1)),
        }.items():
            expected, actual = getattr(REFERENCE, name)(*arguments), run(kernels, name, *arguments)
            assert actual.dtype == dtype
            assert_close_report(actual, expected, rel_norm=max(torch.finfo(dtype).eps / 8, 3e-6))

    @pytest.mark.parametrize(("rows", "size"), ROW_SHAPES)
    def test_silu_and_mul_equals_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, rows: int, size: int
    ) -> None:
        """The gate is the first half."""
        gate_up_T2F = random(rows, 2 * size, device=device, dtype=dtype) * 4
        expected = REFERENCE.silu_and_mul(gate_up_T2F)
        assert_equal(run(kernels, "silu_and_mul", gate_up_T2F), expected)

    @pytest.mark.filterwarnings("ignore:overflow")
    def test_silu_and_mul_stays_finite(self, kernels: KernelSet, device: torch.device) -> None:
        """The exponential of a large gate overflows; the result does not."""
        gates = [-1e4, -100.0, 100.0, 1e4]
        gate_up_T2F = torch.tensor([[gate, 2.0] for gate in gates], device=device)
        expected = torch.tensor([[max(gate, 0.0) * 2.0] for gate in gates])
        assert_close_report(kernels.silu_and_mul(gate_up_T2F), expected, rel_norm=1e-6)

    @pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
    def test_products_equal_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """Alone, after a norm, and with the gated activation behind it."""
        rows, inputs, outputs = shape
        x_TE = random(rows, inputs, device=device, dtype=dtype)
        weight_XE = random(outputs, inputs, device=device, dtype=dtype, seed=1) * 0.1
        norm_E = random(inputs, device=device, dtype=dtype, seed=2)
        expected = REFERENCE.linear(x_TE, weight_XE)
        assert_equal(run(kernels, "linear", x_TE, weight_XE), expected)
        for name in ("norm_linear", "norm_gate_up"):
            arguments = (x_TE, norm_E, 1e-2, weight_XE)
            expected = getattr(REFERENCE, name)(*arguments)
            assert_equal(run(kernels, name, *arguments), expected)

    @pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
    def test_products_with_a_bias_equal_the_reference(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """It is added once, behind the product: before the activation, and to the residual too.

        A set's `gate_up` is checked here too, with a bias and without.
        """
        rows, inputs, outputs = shape
        x_TE = random(rows, inputs, device=device, dtype=dtype)
        weight_XE = random(outputs, inputs, device=device, dtype=dtype, seed=1) * 0.1
        norm_E = random(inputs, device=device, dtype=dtype, seed=2)
        bias_X = random(outputs, device=device, dtype=dtype, seed=3)
        residual_TE = random(rows, outputs, device=device, dtype=dtype, seed=4)
        out_TX = torch.full_like(residual_TE, float("nan"))
        for name, arguments in {
            "linear": (x_TE, weight_XE, bias_X),
            "norm_linear": (x_TE, norm_E, 1e-2, weight_XE, bias_X),
            "norm_gate_up": (x_TE, norm_E, 1e-2, weight_XE, bias_X),
        }.items():
            expected = getattr(REFERENCE, name)(*arguments)
            assert_equal(run(kernels, name, *arguments), expected)
        if isinstance(kernels, GatedKernels):
            for bias in (None, bias_X):
                gate_up_T2F = REFERENCE.linear(x_TE, weight_XE, bias)
                actual = kernels.gate_up(x_TE, weight_XE, bias)
                assert_equal(actual, REFERENCE.silu_and_mul(gate_up_T2F))
        expected = REFERENCE.linear(x_TE, weight_XE, bias_X)
        run(kernels, "linear", x_TE, weight_XE, bias_X, out_TX)
        assert_equal(out_TX, expected)
        expected = REFERENCE.linear_add(x_TE, weight_XE, residual_TE.clone(), bias_X)
        assert_equal(run(kernels, "linear_add", x_TE, weight_XE, residual_TE, bias_X), expected)

    @pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
    def test_linear_writes_where_it_is_told(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """The logits of all captured graphs share one buffer; what was written is returned."""
        rows, inputs, outputs = shape
        x_TE = random(rows, inputs, device=device, dtype=dtype)
        weight_XE = random(outputs, inputs, device=device, dtype=dtype, seed=1)
        out_TX = torch.full((rows + 1, outputs), float("nan"), device=device, dtype=dtype)
        returned_TX = run(kernels, "linear", x_TE, weight_XE, None, out_TX[:rows])
        assert_equal(out_TX[:rows], REFERENCE.linear(x_TE, weight_XE))
        assert torch.equal(returned_TX, out_TX[:rows]), "it returned something else"
        assert out_TX[rows].isnan().all(), "it wrote behind its rows"

    @pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
    def test_linear_does_not_round_what_it_writes_to_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """The logits of routers that choose experts by the unrounded sums."""
        rows, inputs, outputs = shape
        x_TE = random(rows, inputs, device=device, dtype=dtype)
        weight_XE = random(outputs, inputs, device=device, dtype=dtype, seed=1)
        out_TX = torch.full((rows, outputs), float("nan"), device=device)
        returned_TX = run(kernels, "linear", x_TE, weight_XE, None, out_TX)
        assert torch.equal(returned_TX, out_TX), "it returned something else"
        exact_TX = (x_TE.double() @ weight_XE.double().t()).float()
        assert_close_report(out_TX, exact_TX, rel_norm=UNROUNDED)

    @pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
    def test_linear_add_adds_to_the_residual(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype, shape: Shape
    ) -> None:
        """What is returned is residual + x W^T, once."""
        rows, inputs, outputs = shape
        x_TF = random(rows, inputs, device=device, dtype=dtype)
        weight_EF = random(outputs, inputs, device=device, dtype=dtype, seed=1) * 0.1
        residual_TE = random(rows, outputs, device=device, dtype=dtype, seed=2)
        expected = REFERENCE.linear_add(x_TF, weight_EF, residual_TE.clone())
        assert_equal(run(kernels, "linear_add", x_TF, weight_EF, residual_TE), expected)

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
        """q, and what lies in the blocks: k normed and rotated, v as it is."""
        prep = make_prep(heads, device, dtype, rotary=16 if variant == "half rotated" else 32)
        if variant == "no norm":
            prep = replace(prep, q_norm_weight=None, k_norm_weight=None)
        check_prepare(kernels, prep, device, dtype, slots=[9, 2, 23, 0, 14])

    def test_many_tokens_are_prepared_as_few_are(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A step with prompts, over blocks in any order, with padding among the rows."""
        prep = make_prep((4, 2), device, dtype)
        slots = [-1 if row % 7 == 3 else row * 5 % 512 for row in range(129)]
        check_prepare(kernels, prep, device, dtype, slots=slots)

    def test_heads_are_normed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Of values around 1000, whose squares overflow float16."""
        prep = make_prep((4, 2), device, dtype)
        check_prepare(kernels, prep, device, dtype, slots=[9, 2, 23, 0, 14], scale=1000.0)

    def test_a_slot_of_minus_one_stores_nothing(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A padded row of a graph writes to no block, least of all to the first or last slot."""
        prep = make_prep((4, 2), device, dtype)
        check_prepare(kernels, prep, device, dtype, slots=[-1, 5, -1, 6, -1])
        check_prepare(kernels, prep, device, dtype, slots=[-1] * 5)

    def test_blocks_may_lie_apart(
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
        """Called twice, with a bias and without; so a replayed step repeats itself."""
        x_TE = random(5, 64, device=device, dtype=dtype)
        weight_XE = random(48, 64, device=device, dtype=dtype, seed=1)
        norm_E = random(64, device=device, dtype=dtype, seed=2)
        bias_X = random(48, device=device, dtype=dtype, seed=3)
        for name, bias in product(("norm_linear", "norm_gate_up"), (None, bias_X)):
            operation = partial(getattr(kernels, name), x_TE, norm_E, 1e-6, weight_XE, bias)
            assert torch.equal(operation().clone(), operation()), name


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
    scale: float = 1.0,
) -> None:
    """Both sets on equal inputs: equal q, and equal caches, also where nothing was stored."""
    width = (prep.num_heads + 2 * prep.num_kv_heads) * prep.head_size
    qkv_TX = random(len(slots), width, device=device, dtype=dtype) * scale
    some_positions = ([63, 0, 7, 31, 7, *range(64)] * len(slots))[: len(slots)]
    positions_T = torch.tensor(some_positions, dtype=positions, device=device)
    slots_T = torch.tensor(slots, device=device)
    shape = (max(6, max(slots) // BLOCK_SIZE + 1), BLOCK_SIZE, prep.num_kv_heads, prep.head_size)
    blocks, (k_cache, v_cache) = make_caches(shape, device, dtype, strided=strided)
    expected_blocks, (expected_k, expected_v) = make_caches(shape, device, dtype, strided=strided)
    arguments = (qkv_TX, prep, positions_T, slots_T)
    expected_q_THD = REFERENCE.prepare_qkv(*arguments, expected_k, expected_v)
    q_THD = run(kernels, "prepare_qkv", *arguments, k_cache, v_cache)
    assert q_THD.shape == (len(slots), prep.num_heads, prep.head_size)
    assert q_THD.is_contiguous()
    for actual, expected in ((q_THD, expected_q_THD), (k_cache, expected_k), (v_cache, expected_v)):
        assert_equal(actual, expected)
    untouched = expected_blocks == UNUSED
    assert (blocks[untouched] == UNUSED).all(), "it wrote where nothing belongs"


def make_caches(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, strided: bool
) -> tuple[Tensor, Tensor]:
    """All memory, and in it the two caches of shape [N, P, K, D]; nothing is stored yet."""
    if not strided:
        blocks = torch.full((2, *shape), UNUSED, device=device, dtype=dtype)
        return blocks, blocks
    # [K, 2, N, P, 2D] seen as [N, P, K, D]: nothing is contiguous but the last dimension.
    num_blocks, block_size, heads, size = shape
    wide = torch.full(
        (heads, 2, num_blocks, block_size, 2 * size), UNUSED, device=device, dtype=dtype
    )
    return wide, wide[..., :size].permute(1, 2, 3, 0, 4)
