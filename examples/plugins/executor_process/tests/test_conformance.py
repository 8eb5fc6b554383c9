"""The suite of executors, over a process of its own."""

from __future__ import annotations

import pytest

from nanovllm_example_executor_process.plugin import PROCESS
from nanovllm_kit import ExecutorConformance, PluginUnderTest, plugin_under_test


@pytest.mark.slow  # a process for each check; test_process.py has tokens and failures
class TestProcess(ExecutorConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(PROCESS)
