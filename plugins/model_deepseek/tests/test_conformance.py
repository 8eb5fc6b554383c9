"""The suite that every model plugin passes, for both architectures."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import pytest

from nanovllm_kit.conformance import PluginUnderTest, installed_plugin
from nanovllm_kit.model import ModelConformance

find_once = cache(installed_plugin)
"""Each look at what is installed reads the metadata of all of it."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
REFUSED: dict[str, dict[str, Any]] = {
    "fewer KV heads than heads": {"num_key_value_heads": 2},
    "groups that do not divide the experts": {"n_group": 4},
    "more groups for a token than there are": {"topk_group": 4},
    "more experts for a token than its groups have": {"num_experts_per_tok": 7},
    "biases of attention": {"attention_bias": True},
    "half of the rotated part": {
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    },
}


class DeepSeek(ModelConformance):
    """What both promise."""

    rope_kinds = frozenset({"default", "linear", "yarn", "llama3"})
    # A sum of two other sizes, and a switch of training.
    harmless = frozenset({"qk_head_dim", "output_router_logits"})


class TestDeepseekV2(DeepSeek):
    """DeepSeek-V2 against transformers' DeepseekV2ForCausalLM."""

    variants: ClassVar = {
        "queries that are not compressed": {"q_lora_rank": None},
        "the best experts of all groups": {"topk_method": "greedy", "n_group": None},
        "a mixture in every layer": {"first_k_dense_replace": 0},
        "no mixture at all": {"first_k_dense_replace": 9},
        "yarn with mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    }
    refused: ClassVar = {
        **REFUSED,
        "an unknown choice": {"topk_method": "noaux_tc"},
        "scores by sigmoid": {"scoring_func": "sigmoid"},
        "weights that add up to 1": {"norm_topk_prob": True},
        "biases of MLPs": {"mlp_bias": True},
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return find_once("model", "DeepseekV2ForCausalLM")


class TestDeepseekV3(DeepSeek):
    """DeepSeek-V3 against transformers' DeepseekV3ForCausalLM."""

    variants: ClassVar = {
        "queries that are not compressed": {"q_lora_rank": None},
        "weights that do not add up to 1": {"norm_topk_prob": False},
        "one group": {"n_group": 1, "topk_group": 1},
        "yarn with mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    }
    refused: ClassVar = {
        **REFUSED,
        "groups of one expert": {"n_group": 9, "topk_group": 8},
        "scores by softmax": {"scoring_func": "softmax"},
        "a choice without a bias": {"topk_method": "greedy"},
        "halves that rotate": {"rope_interleave": False},
    }

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return find_once("model", "DeepseekV3ForCausalLM")
