"""The executor keeps the contract of executors, and its own promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ConfigError
from nanovllm_kit import ExecutorConformance, PluginUnderTest, plugin_under_test

from nanovllm_executor_my_plugin.plugin import SPEC

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "num_kvcache_blocks": 8,
}


class TestMyPlugin(ExecutorConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)


def test_the_file_gets_a_line_for_each_step(tmp_path: Path) -> None:
    """The prompt's tokens in the first, one token in each of the others."""
    file = tmp_path / "steps.csv"
    executor = {"name": SPEC.name, "options": {"csv": str(file)}}
    with LLM("demo", executor=executor, **SMALL) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    title, *lines = file.read_text().splitlines()
    assert title == "tokens,rows,seconds"
    assert [line.split(",")[:2] for line in lines] == [["3", "1"]] + [["1", "1"]] * 3
    assert all(float(line.split(",")[2]) > 0 for line in lines)


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    executor = {"name": SPEC.name, "options": {"csv": str(tmp_path / "none" / "steps.csv")}}
    with pytest.raises(ConfigError, match=r"executor\.options\.csv"):
        LLM("demo", executor=executor, **SMALL)
