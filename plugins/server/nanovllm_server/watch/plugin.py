"""What the server brings as plugins: observers, and the kind `route`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import KindSpec, ObserverSpec, hookimpl
from nanovllm_server.watch.routes import RouteSpec

ROUTE = KindSpec(
    name="route",
    contract=2,
    current_contract=1,
    spec=RouteSpec,
    interface="nanovllm_server.watch.routes:RoutePlugin",
    hookspecs="nanovllm_server.watch.hookspecs",
    conformance="nanovllm_server.watch.testing:RouteConformance",
    summary="Routes and middleware of `nanovllm serve`.",
)


class PrometheusOptions(BaseModel):
    """Options of `observers: [{name: prometheus}]`, which `nanovllm serve` adds by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(description="Where the engine's file of counts is made; it must exist.")


PROMETHEUS = ObserverSpec(
    name="prometheus",
    impl="nanovllm_server.watch.observer:PrometheusObserver",
    summary="Counts steps and requests for the server's /metrics.",
    options=PrometheusOptions,
    contract=1,
)


class TraceOptions(BaseModel):
    """Options of `observers: [{name: opentelemetry}]`, which `serve.tracing` adds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="The URL that spans are posted to (OTLP over HTTP); left out, what "
        "OpenTelemetry's environment variables say.",
    )
    service_name: str = Field(default="nanovllm", description="The service's name in traces.")


OPENTELEMETRY = ObserverSpec(
    name="opentelemetry",
    impl="nanovllm_server.watch.tracing:TraceObserver",
    summary="A span of OpenTelemetry for each request (the extra `tracing`).",
    options=TraceOptions,
    contract=1,
)


@hookimpl
def nanovllm_kinds() -> Sequence[KindSpec]:
    return [ROUTE]


@hookimpl
def nanovllm_observers() -> Sequence[ObserverSpec]:
    return [PROMETHEUS, OPENTELEMETRY]
