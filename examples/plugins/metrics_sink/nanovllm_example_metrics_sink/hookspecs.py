"""The hook of the kind `metrics_sink`; nanovllm adds it to its own."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import hookspec
from nanovllm_example_metrics_sink.interface import MetricsSinkSpec


@hookspec
def nanovllm_metrics_sinks() -> Sequence[MetricsSinkSpec]:
    """Places for metrics (group `nanovllm.metrics_sinks`)."""
