"""What nanovllm reads of this plugin before it is selected; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl

SPEC = ModelSpec(
    name="Qwen2ForCausalLM",
    impl="nanovllm_example_model_qwen2.model:Qwen2ForCausalLM",
    summary="Qwen2 and Qwen2.5 dense: biases on q, k and v",
    contract=2,
)


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    return [SPEC]
