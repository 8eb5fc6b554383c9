"""In bfloat16 a router chooses the experts of transformers, from logits that are as exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from nanovllm_kit.routers import check_router
from nanovllm_model_deepseek.settings import read_v2_mixture, read_v3_mixture

SIZES: dict[str, Any] = {"hidden_size": 768, "num_experts_per_tok": 6}
V2 = {**SIZES, "n_routed_experts": 64, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
ROUTERS: Mapping[str, tuple[PreTrainedConfig, Any, Any]] = {
    "V2-Lite": (
        DeepseekV2Config(**V2, topk_method="greedy"), read_v2_mixture, DeepseekV2TopkRouter
    ),
    "V2": (
        DeepseekV2Config(**V2, topk_method="group_limited_greedy"),
        read_v2_mixture,
        DeepseekV2TopkRouter,
    ),
    "V3": (
        DeepseekV3Config(**SIZES, n_routed_experts=96, n_group=8, topk_group=4),
        read_v3_mixture,
        DeepseekV3TopkRouter,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_s_logits_are_as_exact_as_those_of_transformers(name: str) -> None:
    """Both keep them in float32, where rounded ones would choose other experts."""
    config, read_mixture, reference = ROUTERS[name]
    mixture = read_mixture(config.to_dict())
    check_router(reference(config), mixture.routing, bias=mixture.has_bias)
