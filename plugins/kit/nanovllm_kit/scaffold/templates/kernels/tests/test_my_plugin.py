"""The kernel set keeps the contract of kernel sets."""

from __future__ import annotations

import pytest
from nanovllm_kit import KernelSetConformance, PluginUnderTest, plugin_under_test

from nanovllm_kernels_my_plugin.plugin import SPEC


class TestMyPlugin(KernelSetConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


class TestMyPluginInFloat64(KernelSetConformance):
    """The same with another option."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC, compute="float64")
