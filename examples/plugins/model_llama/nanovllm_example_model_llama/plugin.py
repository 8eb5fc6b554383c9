"""What nanovllm reads of this plugin before it is selected; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl

LLAMA = ModelSpec(
    name="LlamaForCausalLM",
    impl="nanovllm_example_model_llama.model:LlamaForCausalLM",
    summary="Llama 1 to 3.3, and what has their architecture",
    contract=2,
)
MISTRAL = ModelSpec(
    name="MistralForCausalLM",
    impl="nanovllm_example_model_llama.model:MistralForCausalLM",
    summary="Mistral 7B and what has its architecture, with or without a sliding window",
    contract=2,
)


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    """One distribution may bring several architectures; each has an entry point of its name."""
    return [LLAMA, MISTRAL]
