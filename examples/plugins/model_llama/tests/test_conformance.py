"""Both models keep their contract; transformers is the reference."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from nanovllm_example_model_llama.plugin import LLAMA, MISTRAL
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test

Settings = dict[str, Any]
ROPES = frozenset({"default", "linear", "yarn", "llama3"})
REFUSED: Settings = {
    "mixed layers": {"layer_types": ["full_attention", "sliding_attention"]},
    "a rope that changes under cached keys": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    },
}


class TestLlama(ModelConformance):
    variants: ClassVar[Settings] = {
        "attention biases": {"attention_bias": True},
        "MLP biases": {"mlp_bias": True},
        "heads of another size": {"head_dim": 24},
        "Llama 3.1's rope, tied": {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    }
    rope_kinds = ROPES
    refused: ClassVar[Settings] = REFUSED

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(LLAMA)


class TestMistral(ModelConformance):
    variants: ClassVar[Settings] = {
        "no window": {"sliding_window": None},
        "a window longer than the context": {"sliding_window": 64},
        "a short window": {"sliding_window": 5},
    }
    rope_kinds = ROPES
    refused: ClassVar[Settings] = {**REFUSED, "no window's length": {"sliding_window": 0}}

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(MISTRAL)
