"""The part of the kernel sets' suite about latent attention, against plain computations.

Shape suffixes as in `nanovllm_core.interfaces.kernels`; X rotated numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.kernels import KernelSet, LatentPrep
from nanovllm_kit.kernel_calls import assert_equal, random, run

LATENT_SIZES = [(1, 16, 8, 32), (3, 5, 2, 9), (16, 128, 64, 512)]
"""(heads, nope, rotated, latent): whole tiles, none, and the usual ones."""
EPS, BLOCK_SIZE, UNUSED, MAX_POSITION = 1e-2, 4, 5.0, 64
HEAD_PRODUCTS = [(1, 16, 32, 0), (3, 9, 5, 2), (16, 128, 64, 64)]
"""(heads, inputs, outputs, numbers behind the inputs)."""


class LatentChecks:
    """Inherited by `KernelSetConformance`, which has the fixtures."""

    @pytest.mark.parametrize("sizes", LATENT_SIZES, ids=str)
    @pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64], ids=str)
    def test_latent_rows_and_queries_are_prepared(
        self,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        positions_dtype: torch.dtype,
    ) -> None:
        """Rows normed, rotated and in their slots alone; the rotated part of q turned, no more."""
        slots = [9, 2, -1, 23, 0]
        positions_T = torch.tensor([63, 0, 7, 31, 7], dtype=positions_dtype)
        check_latent(kernels, device, dtype, sizes, slots, positions_T)

    def test_many_latent_rows_are_prepared_as_few_are(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """A step with prompts, over blocks in any order, with padding; and padding alone."""
        positions_T = torch.arange(129, dtype=torch.int32) % MAX_POSITION
        slots = [-1 if row % 7 == 3 else row * 5 % 512 for row in range(129)]
        check_latent(kernels, device, dtype, LATENT_SIZES[0], slots, positions_T)
        check_latent(kernels, device, dtype, LATENT_SIZES[1], [-1] * 129, positions_T)

    def test_latent_rows_are_normed_in_float32(
        self, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Of values around 1000, whose squares overflow float16."""
        positions_T = torch.zeros(3, dtype=torch.int32)
        check_latent(kernels, device, dtype, LATENT_SIZES[0], [3, 1, 0], positions_T, scale=1000.0)

    @pytest.mark.parametrize("sizes", HEAD_PRODUCTS, ids=str)
    @pytest.mark.parametrize("rows", [1, 3, 40, 130])
    def test_every_head_has_its_own_product(
        self,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        rows: int,
    ) -> None:
        """Of weights in either order, whose heads lie apart; what is behind the inputs follows."""
        num_heads, inputs, outputs, more = sizes
        x_THX = random(rows, num_heads, inputs + more, device=device, dtype=dtype)
        wide = random(num_heads, inputs + 3, outputs, device=device, dtype=dtype, seed=1) * 0.1
        for weight_HOI in (
            wide[:, 3:].transpose(1, 2),
            wide.transpose(1, 2).contiguous()[:, :, :inputs],
        ):
            out = run(kernels, "linear_per_head", x_THX, weight_HOI)
            assert out.shape == (rows, num_heads, outputs + more)
            assert out.is_contiguous()
            expected = torch.einsum(
                "thi,hoi->tho", x_THX[..., :inputs].double(), weight_HOI.double()
            )
            assert_equal(out[..., :outputs], expected.to(dtype))
            assert torch.equal(out[..., outputs:], x_THX[..., inputs:])


def check_latent(
    kernels: KernelSet,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    slots: list[int],
    positions_T: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """One preparation, of parts of a packed product, into blocks that are wider than a row."""
    num_heads, nope, rotated, latent = sizes
    row, num_tokens = latent + rotated, len(slots)
    split = (num_heads * (nope + rotated), row)
    packed_TX = random(num_tokens, sum(split), device=device, dtype=dtype) * scale
    q_TX, rows_TR = packed_TX.split(split, dim=-1)
    q_THD = q_TX.unflatten(-1, (num_heads, -1))
    prep = LatentPrep(
        norm_weight=random(latent, device=device, dtype=dtype, seed=1),
        cos_sin_cache=random(MAX_POSITION, rotated, device=device, seed=2),
        eps=EPS,
    )
    num_blocks = max(6, max(slots) // BLOCK_SIZE + 1)
    blocks = torch.full((num_blocks, BLOCK_SIZE, row + 8), UNUSED, device=device, dtype=dtype)
    positions_T = positions_T.to(device)
    slots_T = torch.tensor(slots, device=device)
    arguments = (q_THD, rows_TR, prep, positions_T, slots_T, blocks[..., :row])
    out_THD = run(kernels, "prepare_latent", *arguments)
    assert out_THD.shape == q_THD.shape
    assert out_THD.is_contiguous()

    cos_sin_TX = prep.cos_sin_cache[positions_T.long()].double()
    assert torch.equal(out_THD[..., :nope], q_THD[..., :nope]), "it changed what is not rotated"
    assert_equal(out_THD[..., nope:], rotate(q_THD[..., nope:], cos_sin_TX[:, None]))
    expected = torch.full_like(blocks, UNUSED).flatten(0, 1)
    latent_TL = rows_TR[:, :latent].double()
    mean_T1 = latent_TL.square().mean(-1, keepdim=True)
    normed_TL = latent_TL * (mean_T1 + EPS).rsqrt() * prep.norm_weight.double()
    stored_T = slots_T >= 0
    expected[slots_T[stored_T], :latent] = normed_TL[stored_T].to(dtype)
    turned_TX = rotate(rows_TR[:, latent:], cos_sin_TX)
    expected[slots_T[stored_T], latent:row] = turned_TX[stored_T]
    stored, untouched = blocks.flatten(0, 1), expected == UNUSED
    assert (stored[untouched] == UNUSED).all(), "it wrote where nothing belongs"
    for part in (slice(0, latent), slice(latent, row)):
        assert_equal(stored[:, part], expected[:, part])


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Numbers 2i and 2i + 1 turned against one another, in float64, rounded to x's dtype."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=torch.float64)
    out[..., 0::2] = x[..., 0::2].double() * cos - x[..., 1::2].double() * sin
    out[..., 1::2] = x[..., 1::2].double() * cos + x[..., 0::2].double() * sin
    return out.to(x.dtype)
