"""What nanovllm reads of this plugin before it is selected; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import ModelSpec, hookimpl

_MODELS = "nanovllm_example_model_gemma.model"
_LAYERS = {
    # Both kinds of layers in every small checkpoint, and a window that is shorter than prompts.
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 5,
    "query_pre_attn_scalar": 150,
}

GEMMA2 = ModelSpec(
    name="Gemma2ForCausalLM",
    impl=f"{_MODELS}:Gemma2ForCausalLM",
    summary="Gemma 2: soft caps, every second layer with a sliding window",
    contract=2,
    test_config=_LAYERS,
)
GEMMA3 = ModelSpec(
    name="Gemma3ForCausalLM",
    impl=f"{_MODELS}:Gemma3ForCausalLM",
    summary="Gemma 3 as text alone: five of six layers with a sliding window",
    contract=2,
    test_config={
        **_LAYERS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
        },
    },
)
GEMMA3_TEXT = ModelSpec(
    name="Gemma3ForConditionalGeneration",
    impl=f"{_MODELS}:Gemma3ForConditionalGeneration",
    summary="The text model of a Gemma 3 that also sees; its vision weights are not loaded",
    contract=2,
)


@hookimpl
def nanovllm_models() -> Sequence[ModelSpec]:
    """One distribution may bring several architectures; each has an entry point of its name."""
    return [GEMMA2, GEMMA3, GEMMA3_TEXT]
