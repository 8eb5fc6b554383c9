"""The observer keeps the contract of observers, and its own promise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from nanovllm_core import LLM, SamplingParams
from nanovllm_kit import ObserverConformance, PluginUnderTest, plugin_under_test

from nanovllm_observer_my_plugin.plugin import SPEC

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "num_kvcache_blocks": 8,
}


class TestMyPlugin(ObserverConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


def test_the_log_gets_a_line_per_so_many_steps_and_the_rest_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Five tokens take five steps: two lines of two, and one of one."""
    caplog.set_level(logging.INFO, "nanovllm_observer_my_plugin")
    observers = [{"name": SPEC.name, "options": {"every": 2}}]
    with LLM("demo", observers=observers, **SMALL) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("nanovllm_observer")]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4", "step 5"]
    assert all("tokens/s written" in line for line in lines)
