"""Weights on their way to a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from nanovllm_core.layers.module import copy_weight

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("seed", range(12))
def test_a_weight_arrives_bit_for_bit_whatever_its_size(seed: int) -> None:
    """Whole or a part, by rows or by columns, larger or smaller than the pinned memory."""
    draw = random.Random(seed)
    dtype, stored = draw.choice(DTYPES), draw.choice(DTYPES)
    shape = draw.choice([(), (7,), (draw.randint(1, 300), 11), (draw.randint(1500, 3000), 6144)])
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(stored)
    if whole.dim() == 2 and draw.random() < 0.5:
        whole = whole.narrow(1, 3, 5 if shape[1] == 11 else 6000)
    target = torch.full(whole.shape, float("nan"), dtype=dtype, device="cuda")
    copy_weight(target, whole)
    assert torch.equal(target.cpu(), whole.to(dtype))
