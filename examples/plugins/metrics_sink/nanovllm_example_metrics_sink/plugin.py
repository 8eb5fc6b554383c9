"""What this distribution brings: a kind, an observer that feeds it, and one plugin of it.

Importing this module imports no torch, and no code of the observer or the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import KindSpec, ObserverSpec, hookimpl
from nanovllm_example_metrics_sink.interface import MetricsSinkSpec

KIND = KindSpec(
    name="metrics_sink",
    contract=2,
    current_contract=1,
    spec=MetricsSinkSpec,
    interface="nanovllm_example_metrics_sink.interface:MetricsSink",
    hookspecs="nanovllm_example_metrics_sink.hookspecs",
    conformance="nanovllm_example_metrics_sink.testing:MetricsSinkConformance",
    summary="Places that the engine's metrics go to.",
)


class SinkChoice(BaseModel):
    """A sink by its name, with the options that its own model checks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class MetricsOptions(BaseModel):
    """Options of `observers: [{name: metrics}]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sinks: tuple[SinkChoice, ...] = Field(
        default=(SinkChoice(name="jsonl"),), min_length=1, description="Where the metrics go."
    )
    every: int = Field(default=100, ge=1, description="Steps that one line of metrics sums up.")
    requests: bool = Field(
        default=False,
        description="Give the sinks every request that is over, with its labels, too.",
    )


OBSERVER = ObserverSpec(
    name="metrics",
    impl="nanovllm_example_metrics_sink.observer:MetricsObserver",
    summary="Gives sums over steps, and requests, to metrics sinks.",
    options=MetricsOptions,
    contract=1,
)


class JsonlOptions(BaseModel):
    """Options of the sink `jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(
        default=Path("metrics.jsonl"),
        description="The file that lines are appended to; its folder must exist.",
    )


JSONL = MetricsSinkSpec(
    name="jsonl",
    impl="nanovllm_example_metrics_sink.jsonl:JsonlSink",
    summary="A line of JSON for each window, appended to a file.",
    options=JsonlOptions,
    contract=1,
)


@hookimpl
def nanovllm_kinds() -> Sequence[KindSpec]:
    return [KIND]


@hookimpl
def nanovllm_observers() -> Sequence[ObserverSpec]:
    return [OBSERVER]


@hookimpl
def nanovllm_metrics_sinks() -> Sequence[MetricsSinkSpec]:
    return [JSONL]
