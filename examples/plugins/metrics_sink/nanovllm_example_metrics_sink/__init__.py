"""Places that the engine's metrics go to: a new kind of plugin, an observer and a sink."""

from nanovllm_example_metrics_sink.interface import Metrics, MetricsSink, MetricsSinkSpec

__all__ = ["Metrics", "MetricsSink", "MetricsSinkSpec"]
