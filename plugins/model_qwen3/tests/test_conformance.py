"""The suite that every model plugin passes."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import pytest

from nanovllm_kit.conformance import PluginUnderTest, installed_plugin
from nanovllm_kit.model import ModelConformance

find_once = cache(installed_plugin)
"""Each look at what is installed reads the metadata of all of it."""


class TestQwen3(ModelConformance):
    """Qwen3 against transformers' Qwen3ForCausalLM."""

    variants: ClassVar = {
        "attention biases": {"attention_bias": True},
        "one KV head": {"num_key_value_heads": 1},
        "wide heads": {"head_dim": 48},
        "a window that no layer has": {"use_sliding_window": True, "sliding_window": 5},
    }
    rope_kinds = frozenset({"default", "linear", "yarn", "llama3"})
    refused: ClassVar = {
        "a sliding window": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "layer_types": None,
        },
        "windowed layers": {"layer_types": ["full_attention", "sliding_attention"]},
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return find_once("model", "Qwen3ForCausalLM")
