"""The suite that every constraint passes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from nanovllm_example_constraint_choices.plugin import SPEC
from nanovllm_kit import ConstraintConformance, PluginUnderTest, plugin_under_test


class TestChoices(ConstraintConformance):
    arguments: ClassVar[list[dict[str, Any]]] = [
        {"texts": ["yes", "no", "yes please"]},
        {"texts": ["a"]},
    ]

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
