"""The model keeps its contract; transformers is the reference."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from nanovllm_example_model_qwen2.plugin import SPEC
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test

Settings = dict[str, Any]


class TestQwen2(ModelConformance):
    variants: ClassVar[Settings] = {
        "tied": {"tie_word_embeddings": True},
        "one KV head": {"num_key_value_heads": 1},
        "windows switched off": {"use_sliding_window": False, "sliding_window": 5},
        "a window that no layer has": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 5,
        },
        "a window in every layer": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    }
    rope_kinds = frozenset({"default", "linear", "yarn", "llama3"})
    refused: ClassVar[Settings] = {
        "a window in some layers": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": None,
        },
        "the same, layer by layer": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
