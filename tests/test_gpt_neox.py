"""A model of another make than the core's decoder passes the suite with its test configuration."""

from __future__ import annotations

from typing import ClassVar

import pytest

from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test

from .gpt_neox_plugin import SPEC


class TestGPTNeoX(ModelConformance):
    variants: ClassVar = {
        "one after the other": {"use_parallel_residual": False},
        "no attention biases": {"attention_bias": False},
    }
    rope_kinds = frozenset({"default", "linear", "llama3"})
    harmless = frozenset({"classifier_dropout"})

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
