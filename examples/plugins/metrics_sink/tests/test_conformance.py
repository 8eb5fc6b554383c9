"""The observer, the kind and the sink keep their contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm_example_metrics_sink.plugin import JSONL, OBSERVER
from nanovllm_example_metrics_sink.testing import MetricsSinkConformance
from nanovllm_kit import ObserverConformance, PluginUnderTest, plugin_under_test


class TestMetricsObserver(ObserverConformance):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> PluginUnderTest:
        sink = {"name": "jsonl", "options": {"path": str(tmp_path / "metrics.jsonl")}}
        return plugin_under_test(OBSERVER, sinks=[sink], every=2)


class TestJsonlSink(MetricsSinkConformance):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> PluginUnderTest:
        return plugin_under_test(JSONL, path=str(tmp_path / "metrics.jsonl"))
