"""The suite that every model plugin passes."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import pytest

from nanovllm_kit.conformance import PluginUnderTest, installed_plugin
from nanovllm_kit.model import ModelConformance

find_once = cache(installed_plugin)
"""Each look at what is installed reads the metadata of all of it."""


class TestQwen3Moe(ModelConformance):
    """Qwen3-MoE against transformers' Qwen3MoeForCausalLM."""

    variants: ClassVar = {
        "weights of the chosen experts that add up to 1": {"norm_topk_prob": True},
        "a dense MLP in every other layer": {"decoder_sparse_step": 2},
        "one expert for each token": {"num_experts_per_tok": 1},
    }
    rope_kinds = frozenset({"default", "linear", "yarn", "llama3"})
    refused: ClassVar = {
        "a sliding window": {"use_sliding_window": True},
        "windowed layers": {"layer_types": ["full_attention", "sliding_attention"]},
        "more experts for a token than there are": {"num_experts_per_tok": 500},
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return find_once("model", "Qwen3MoeForCausalLM")
