"""In bfloat16 a mixture with shared experts is as exact as that of transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import LayerContext, SingleRank, SparseMLP
from nanovllm_kit.routers import ERROR_FACTOR
from nanovllm_model_deepseek.settings import read_v2_mixture, read_v3_mixture

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "moe_intermediate_size": 96,
    "n_routed_experts": 24,
    "num_experts_per_tok": 5,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "V2": (DeepseekV2Config, DeepseekV2Moe, read_v2_mixture),
    "V3": (DeepseekV3Config, DeepseekV3MoE, read_v3_mixture),
}


@pytest.mark.parametrize("num_shared", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_mixture_is_as_exact_as_that_of_transformers(name: str, num_shared: int) -> None:
    """The RMS errors of both beside float64 with the same weights: shared experts are in the sum
    before it is rounded."""
    make_config, make_reference, read_mixture = MODELS[name]
    config = make_config(**SIZES, n_shared_experts=num_shared)
    reference = make_reference(config).bfloat16()
    generator = torch.Generator().manual_seed(num_shared)
    for parameter in reference.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    ours = mixture_of(reference, read_mixture(config.to_dict()))
    x_TE = torch.randn(300, SIZES["hidden_size"], generator=generator).bfloat16()
    exact_TE = deepcopy(reference).double()(x_TE[None].double())[0]
    errors = [
        float((y_TE.double() - exact_TE).square().mean().sqrt())
        for y_TE in (ours.experts(x_TE, *ours.gate(x_TE)), reference(x_TE[None])[0])
    ]
    assert errors[0] <= ERROR_FACTOR * errors[1], f"RMS errors, ours and theirs: {errors}"
    assert errors[0] < 0.02 * float(exact_TE.square().mean().sqrt())


def mixture_of(reference: Any, mixture: Any) -> SparseMLP:
    """Ours, with the weights of theirs."""
    context = LayerContext(torch.device("cpu"), torch.bfloat16, SingleRank(), TorchKernels())
    hidden_size = reference.gate.weight.shape[1]
    ours = SparseMLP(
        context,
        hidden_size,
        mixture.expert_size,
        mixture.num_experts,
        mixture.routing,
        bias=mixture.has_bias,
        shared_size=mixture.shared_size,
    )
    shared, own = reference.shared_experts, dict(ours.named_parameters())
    load(own["gate.weight"], None, reference.gate.weight)
    load(own["shared_experts.gate_up_proj.weight"], 0, shared.gate_proj.weight)
    load(own["shared_experts.gate_up_proj.weight"], 1, shared.up_proj.weight)
    load(own["shared_experts.down_proj.weight"], None, shared.down_proj.weight)
    ours.experts.gate_up.weight.copy_(reference.experts.gate_up_proj.flatten(0, 1))
    ours.experts.down.weight.copy_(reference.experts.down_proj.flatten(0, 1))
    if mixture.has_bias:
        bias = torch.linspace(-0.1, 0.1, mixture.num_experts)
        reference.gate.e_score_correction_bias.copy_(bias)
        own["gate.e_score_correction_bias"].copy_(reference.gate.e_score_correction_bias)
    return ours


def load(parameter: Any, shard: object, tensor: Tensor) -> None:
    parameter.weight_loader(parameter, tensor, shard)
