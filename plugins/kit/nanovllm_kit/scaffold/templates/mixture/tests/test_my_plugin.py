"""The model keeps the contract of models: it computes what transformers computes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test
from transformers import Qwen3MoeForCausalLM

from nanovllm_model_my_plugin.plugin import SPEC


class TestMyPlugin(ModelConformance):
    variants: ClassVar = {
        "weights of the chosen experts that add up to 1": {"norm_topk_prob": True},
        "one expert for each token": {"num_experts_per_tok": 1},
        "a dense MLP in two layers": {"mlp_only_layers": [0, 2]},
    }
    refused: ClassVar = {"more experts for a token than there are": {"num_experts_per_tok": 6}}

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)

    @pytest.fixture
    def reference_class(self) -> Any:
        """The class of transformers whose logits the model must give."""
        return Qwen3MoeForCausalLM
