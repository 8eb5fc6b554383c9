"""In bfloat16 a router chooses the experts of transformers, from logits that are as exact."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nanovllm_kit.routers import check_router
from nanovllm_model_qwen3_moe.model import Qwen3MoeForCausalLM


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_router_s_logits_are_as_exact_as_those_of_transformers(renormalize: bool) -> None:
    """Both round them to bfloat16."""
    config = Qwen3MoeConfig(
        hidden_size=768, num_experts=96, num_experts_per_tok=8, norm_topk_prob=renormalize
    )
    check_router(Qwen3MoeTopKRouter(config), Qwen3MoeForCausalLM.routing(config.to_dict()))
