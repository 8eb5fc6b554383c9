"""Norms: what their weights mean, and how they round."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    ColumnParallelLinear,
    LayerContext,
    RMSNorm,
    SingleRank,
    ZeroCenteredRMSNorm,
    finalize_layers,
    norm_linear,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"), [(RMSNorm, Qwen3RMSNorm), (ZeroCenteredRMSNorm, Gemma2RMSNorm)]
)
@torch.inference_mode()
def test_a_norm_has_the_bits_of_transformers(
    ours: type[RMSNorm], theirs: type[torch.nn.Module], dtype: torch.dtype
) -> None:
    """Alone and before a product: 1 + weight stays in float32, and rounds with the rest."""
    torch.manual_seed(0)
    context = LayerContext(CPU, dtype, SingleRank(), TorchKernels())
    norm, expected = ours(context, 96, 1e-3), theirs(96, 1e-3).to(dtype)
    linear = ColumnParallelLinear(context, 96, 24)
    for weight in (norm.weight, *linear.parameters()):
        weight.normal_(0.0, 0.3)
    expected.load_state_dict({"weight": norm.weight})
    finalize_layers(norm)
    x_TE = torch.randn(50, 96).to(dtype)
    assert torch.equal(norm(x_TE), expected(x_TE))
    assert torch.equal(norm_linear(x_TE, norm, linear), linear(expected(x_TE)))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_a_norm_without_a_checkpoint_multiplies_by_one() -> None:
    """The mean of its invented weight is 1, or 0 where 1 is added."""
    context = LayerContext(CPU, torch.float32, SingleRank(), TorchKernels())
    means = [made(context, 4, 1e-6).weight.dummy_mean for made in (RMSNorm, ZeroCenteredRMSNorm)]
    assert means == [1.0, 0.0]
