"""The suite that every logits processor passes."""

from __future__ import annotations

import pytest

from nanovllm_core.testing import LogitsProcessorConformance, PluginUnderTest, plugin_under_test
from nanovllm_example_logits_banned_words.plugin import SPEC


class TestBannedWords(LogitsProcessorConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
