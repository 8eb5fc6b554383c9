"""The suites of the four kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm_example_more_kinds import plugin as module
from nanovllm_kit import (
    ExecutorConformance,
    ExtensionConformance,
    KernelSetConformance,
    PluginUnderTest,
    SamplerConformance,
    extension_under_test,
    plugin_under_test,
)


class TestTimed(ExecutorConformance):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> PluginUnderTest:
        return plugin_under_test(module.TIMED, path=tmp_path / "steps.jsonl")


class TestInverseCdf(SamplerConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(module.INVERSE_CDF)


class TestFloat64(KernelSetConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(module.FLOAT64)


class TestSteps(ExtensionConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return extension_under_test(module.__name__)
