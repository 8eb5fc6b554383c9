"""The client keeps the contract of engine clients, and its own promise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from nanovllm_core import LLM, SamplingParams
from nanovllm_kit import EngineClientConformance, PluginUnderTest, plugin_under_test

from nanovllm_engine_client_my_plugin.plugin import SPEC

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "num_kvcache_blocks": 8,
}


class TestMyPlugin(EngineClientConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


def test_the_log_gets_a_line_for_each_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nanovllm_engine_client_my_plugin")
    client = {"name": SPEC.name, "options": {"every": 1}}
    with LLM("demo", engine_client=client, **SMALL) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    lines = [r.getMessage() for r in caplog.records if "engine_client" in r.name]
    assert lines[0] == "message 1: AddRequests"
