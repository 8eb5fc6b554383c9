"""What nanovllm reads of this plugin before it is selected."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl

_MODELS = "nanovllm_model_deepseek.model"
_SMALL = {
    "num_key_value_heads": 4,
    "head_dim": 12,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 14,
    "moe_intermediate_size": 420,
    "n_shared_experts": 2,
    "first_k_dense_replace": 3,
    "n_routed_experts": 9,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.7,
    "n_group": 3,
    "topk_group": 2,
}
"""Sizes that differ from one another, and no default of transformers among them."""

DEEPSEEK_V2 = ModelSpec(
    name="DeepseekV2ForCausalLM",
    impl=f"{_MODELS}:DeepseekV2ForCausalLM",
    contract=2,
    summary="DeepSeek-V2, V2-Lite: latent attention, a mixture with shared experts",
    test_config={**_SMALL, "topk_method": "group_limited_greedy"},
)
DEEPSEEK_V3 = ModelSpec(
    name="DeepseekV3ForCausalLM",
    impl=f"{_MODELS}:DeepseekV3ForCausalLM",
    contract=2,
    summary="DeepSeek-V3, R1: latent attention, experts chosen by sigmoid, bias and groups",
    test_config=_SMALL,
)


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    return [DEEPSEEK_V2, DEEPSEEK_V3]
