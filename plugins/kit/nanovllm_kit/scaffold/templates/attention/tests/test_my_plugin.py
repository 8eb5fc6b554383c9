"""The backend keeps the contract of attention backends."""

from __future__ import annotations

import pytest
from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test

from nanovllm_attention_my_plugin.plugin import SPEC


class TestMyPlugin(AttentionConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
