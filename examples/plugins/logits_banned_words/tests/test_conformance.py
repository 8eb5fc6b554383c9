"""The suite that every logits processor passes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from nanovllm_example_logits_banned_words.plugin import SPEC
from nanovllm_kit import LogitsProcessorConformance, PluginUnderTest, plugin_under_test


class TestBannedWords(LogitsProcessorConformance):
    """Rows with nothing to forbid, ids, and sequences: 5 after 5 5, 1 after 30 and 4 after 3 11."""

    arguments: ClassVar[list[dict[str, Any]]] = [
        {},
        {"ids": [4, 49]},
        {"ids": [0], "sequences": [[30, 1], [3, 11, 4]]},
        {"sequences": [[5, 5, 5], [12, 5]]},
    ]

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
