"""The suite that every source of checkpoints passes."""

from __future__ import annotations

import pytest

from nanovllm_checkpoint_demo.plugin import nanovllm_checkpoints
from nanovllm_kit import CheckpointConformance, PluginUnderTest, plugin_under_test


class TestDemo(CheckpointConformance):
    """The checkpoint inside the package; its reference is empty."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        [spec] = nanovllm_checkpoints()
        return plugin_under_test(spec)
