"""The sampler keeps the contract of samplers."""

from __future__ import annotations

import pytest
from nanovllm_kit import PluginUnderTest, SamplerConformance, plugin_under_test

from nanovllm_sampler_my_plugin.plugin import SPEC


class TestMyPlugin(SamplerConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


class TestMyPluginWithSalt(SamplerConformance):
    """The same with another option."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC, salt=12345)
