"""The spec of `tests.gpt_neox`, in a light module."""

from __future__ import annotations

from nanovllm_core.api import ModelSpec, hookimpl

SPEC = ModelSpec(
    name="GPTNeoXForCausalLM",
    impl=f"{__package__}.gpt_neox:GPTNeoXForCausalLM",
    summary="GPT-NeoX, with attention and MLP side by side or one after the other.",
    contract=2,
    test_config={
        "layer_norm_eps": 1e-2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
        },
    },
)


@hookimpl
def nanovllm_models() -> list[ModelSpec]:
    return [SPEC]
