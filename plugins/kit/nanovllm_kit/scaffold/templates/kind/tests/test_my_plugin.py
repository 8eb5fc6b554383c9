"""The kind can be declared, its plugin keeps its contract, and the observer feeds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ConfigError
from nanovllm_kit import PluginUnderTest, plugin_under_test
from nanovllm_kit.kind import KindConformance, KindUnderTest, kind_under_test

from nanovllm_kind_my_plugin.conformance import MyPluginConformance
from nanovllm_kind_my_plugin.plugin import JSONL, KIND

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "num_kvcache_blocks": 8,
}


class TestMyPluginKind(KindConformance):
    @pytest.fixture
    def kind(self) -> KindUnderTest:
        return kind_under_test(KIND)


class TestJsonLines(MyPluginConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(JSONL)


def test_each_step_becomes_a_line(tmp_path: Path) -> None:
    """Four tokens take four steps."""
    file = tmp_path / "steps.jsonl"
    use = {"jsonl": {"path": str(file)}}
    observers = [{"name": "my_plugin", "options": {"use": use}}]
    with LLM("demo", observers=observers, **SMALL) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["num_prefill_tokens"] == 3


def test_a_wrong_option_of_a_plugin_is_named_with_its_path() -> None:
    use = {"jsonl": {"pth": "x"}}
    observers = [{"name": "my_plugin", "options": {"use": use}}]
    with pytest.raises(ConfigError, match=r"use\.jsonl\.pth: unknown option"):
        LLM("demo", observers=observers, **SMALL)
