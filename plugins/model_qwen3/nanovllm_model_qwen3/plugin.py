"""What nanovllm reads of this plugin before it is selected."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            name="Qwen3ForCausalLM",
            impl="nanovllm_model_qwen3.model:Qwen3ForCausalLM",
            contract=2,
            summary="Qwen3 dense: grouped-query attention with per-head norm of q and k",
            needs_warm_up=False,
        )
    ]
