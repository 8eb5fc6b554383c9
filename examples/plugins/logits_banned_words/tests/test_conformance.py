"""What every plugin with a spec keeps."""

from __future__ import annotations

import pytest

from nanovllm_core.testing import PluginUnderTest, SpecConformance, plugin_under_test
from nanovllm_example_logits_banned_words.plugin import SPEC


class TestBannedWords(SpecConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
