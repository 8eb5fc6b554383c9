"""The model keeps the contract of models: it computes what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test
from transformers import LlamaForCausalLM

from nanovllm_model_my_plugin.plugin import SPEC


class TestMyPlugin(ModelConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)

    @pytest.fixture
    def reference_class(self) -> Any:
        """The class of transformers whose logits the model must give."""
        return LlamaForCausalLM
