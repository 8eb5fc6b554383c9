"""The flash backend keeps the contract of attention backends."""

from __future__ import annotations

import pytest

from nanovllm_attention_flash.plugin import nanovllm_attention
from nanovllm_kit import AttentionConformance, PluginUnderTest, plugin_under_test


class TestConformance(AttentionConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(nanovllm_attention()[0])
