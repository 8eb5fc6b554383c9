"""What nanovllm reads of this plugin before it is selected."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            name="Qwen3MoeForCausalLM",
            impl="nanovllm_model_qwen3_moe.model:Qwen3MoeForCausalLM",
            contract=2,
            summary="Qwen3 mixture of experts: Qwen3's attention, a few experts for each token",
            test_config={
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 840,
            },
        )
    ]
