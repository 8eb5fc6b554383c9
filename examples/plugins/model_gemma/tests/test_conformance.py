"""Both models keep their contract; transformers is the reference."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from nanovllm_example_model_gemma.plugin import GEMMA2, GEMMA3
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test

Settings = dict[str, Any]
ROPES = frozenset({"default", "linear", "yarn", "llama3"})
FULL, SLIDING = ["full_attention"] * 5, ["sliding_attention"] * 5
VARIANTS: Settings = {
    "attention biases": {"attention_bias": True},
    "heads of another size": {"head_dim": 24, "query_pre_attn_scalar": 7},
    "a window longer than the context": {"sliding_window": 64},
    "all layers slide": {"layer_types": SLIDING},
    "no layer slides": {"layer_types": FULL},
    "logits capped, and tied": {"final_logit_softcapping": 3.0, "tie_word_embeddings": True},
}
REFUSED: Settings = {
    "another activation": {"hidden_activation": "gelu"},
    "a mask that sees ahead": {"use_bidirectional_attention": True},
    "no window's length": {"sliding_window": None},
    "a window of nothing": {"sliding_window": 0},
    "layers of an unknown kind": {"layer_types": ["chunked_attention"] * 5},
    "more kinds than layers": {"layer_types": [*FULL, "full_attention"]},
    "a cap below zero": {"final_logit_softcapping": -1.0},
}


class TestGemma2(ModelConformance):
    variants: ClassVar[Settings] = {
        **VARIANTS,
        "nothing capped": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
        "scores capped low": {"attn_logit_softcapping": 2.0},
        "layers by the pattern": {"layer_types": None},
    }
    rope_kinds = ROPES
    refused: ClassVar[Settings] = REFUSED

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(GEMMA2)


class TestGemma3(ModelConformance):
    variants: ClassVar[Settings] = {
        **VARIANTS,
        "layers by a pattern of three": {"layer_types": None, "sliding_window_pattern": 3},
    }
    rope_kinds = ROPES
    refused: ClassVar[Settings] = {
        **REFUSED,
        "capped scores, which transformers ignores": {"attn_logit_softcapping": 50.0},
        "a rope for no kind of layer": {"rope_parameters": {"rope_type": "default"}},
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(GEMMA3)
