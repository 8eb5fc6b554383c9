"""GET /metrics: the engine's counts and state, and the HTTP requests, as Prometheus reads them."""

from __future__ import annotations

import os
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter as HttpCounter,
    Gauge,
    Histogram as HttpHistogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric as Family,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from nanovllm_server.watch.metrics import GAUGES, LAYOUT, PREFIX, SECONDS
from nanovllm_server.watch.values import Counter, Metric, read_values

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OTHER = "other"
"""The label of a path that no route has: callers choose paths, and labels must stay few. It is also
the method of what a connection refuses, where perhaps no request was read."""


class EngineCollector(Collector):
    """The engine's metrics, all with the label `model_name`; `gauges` reads its state now.

    `folder` has the counts of its observer; None where it has no such observer, and no counts.
    """

    def __init__(
        self, folder: Path | None, model_name: str, gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        self._folder = folder
        self._model_name = model_name
        self._gauges = gauges

    def collect(self) -> Iterator[Family]:
        for name, value in self._gauges().items():
            gauge = GaugeMetricFamily(PREFIX + name, GAUGES[name], labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        if self._folder is None:
            return
        values = read_values(self._folder, LAYOUT)
        for metric in LAYOUT.metrics:
            yield family(metric, LAYOUT.part(values, metric), self._model_name)

    def describe(self) -> list[Family]:
        """Nothing, so that registering reads no file."""
        return []


def family(metric: Metric, numbers: Sequence[float], model_name: str) -> Family:
    """One metric of a file as Prometheus' client writes it."""
    name = PREFIX + metric.name
    if isinstance(metric, Counter):
        labels = ["model_name", metric.label] if metric.label else ["model_name"]
        counter = CounterMetricFamily(name, metric.help, labels=labels)
        for value, number in zip(metric.label_values, numbers, strict=True):
            counter.add_metric([model_name, value] if metric.label else [model_name], number)
        return counter
    histogram = HistogramMetricFamily(name, metric.help, labels=["model_name"])
    *counts, total = numbers
    buckets, below = [], 0.0
    for bound, count in zip((*map(str, metric.bounds), "+Inf"), counts, strict=True):
        below += count
        buckets.append((bound, below))
    histogram.add_metric([model_name], buckets, total)
    return histogram


class HttpMetrics:
    """The metrics of HTTP requests, counted by `HttpMetricsMiddleware`.

    Without a registry they are those of one of several processes: each writes them to files, which
    `make_registry` reads.
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.requests = HttpCounter(
            f"{PREFIX}http_requests",
            "HTTP requests that are over, by route and status.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self.seconds = HttpHistogram(
            f"{PREFIX}http_request_duration_seconds",
            "From an HTTP request's arrival to the end of its answer, of a stream too.",
            ["handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_byte_seconds = HttpHistogram(
            f"{PREFIX}http_first_byte_seconds",
            "From an HTTP request's arrival to the first part of its answer's body.",
            ["handler"],
            buckets=SECONDS,
            registry=registry,
        )
        self.in_progress = Gauge(
            f"{PREFIX}http_requests_in_progress",
            "HTTP requests whose answer is not complete.",
            registry=registry,
            multiprocess_mode="livesum",
        )


class HttpMetricsMiddleware:
    """Counts HTTP requests (pure ASGI). `paths` are the labels for requests that reach no route.

    A request that ends without an answer, because its client went, has the status 499.
    """

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, paths: Callable[[], Collection[str]]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        watch = AnswerWatch(send)
        self._metrics.in_progress.inc()
        try:
            await self._app(scope, receive, watch.send)
        except BaseException:
            watch.status = watch.status or 500
            raise
        finally:
            handler = self._handler(scope)
            self._metrics.in_progress.dec()
            self._metrics.requests.labels(handler, scope["method"], watch.status or 499).inc()
            self._metrics.seconds.labels(handler).observe(perf_counter() - began)
            if watch.first_byte_at:
                self._metrics.first_byte_seconds.labels(handler).observe(
                    watch.first_byte_at - began
                )

    def _handler(self, scope: Scope) -> str:
        if route := getattr(scope.get("route"), "path", ""):
            return str(route)
        path = str(scope["path"])  # It was refused before it reached a route.
        return path if path in self._paths() else OTHER


class AnswerWatch:
    """Passes the parts of one answer on, and keeps its status and when the first part came."""

    __slots__ = ("_send", "first_byte_at", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.first_byte_at = 0.0

    def send(self, message: Message) -> Awaitable[None]:
        """Not a coroutine of its own: a stream calls this for each token."""
        if not self.first_byte_at:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.first_byte_at = perf_counter()
        return self._send(message)


class ProcessesCollector(Collector):
    """The metrics of several processes as if they were one; the start is that of the first."""

    def __init__(self, process_ids: Callable[[], Iterable[int]]) -> None:
        self._process_ids = process_ids

    def collect(self) -> Iterator[Family]:
        values: dict[str, list[float]] = {}
        families: dict[str, Family] = {}
        for process_id in self._process_ids():
            for one in ProcessCollector(pid=partial(int, process_id), registry=None).collect():
                families.setdefault(one.name, one)
                values.setdefault(one.name, []).extend(each.value for each in one.samples)
        for name, one in families.items():
            total = min(values[name]) if name == "process_start_time_seconds" else sum(values[name])
            yield type(one)(name, one.documentation, value=total)  # type: ignore[call-arg]

    def describe(self) -> list[Family]:
        """Nothing, so that registering reads no file."""
        return []


def make_registry(
    engine: EngineCollector,
    http_folder: Path | None = None,
    process_ids: Callable[[], Iterable[int]] = lambda: (os.getpid(),),
) -> CollectorRegistry:
    """The metrics of one server: its engine, its processes but the engine's, its Python.

    Of several front processes, `http_folder` has the files of their HTTP requests.
    """
    registry = CollectorRegistry()
    registry.register(engine)
    registry.register(ProcessesCollector(process_ids))
    PlatformCollector(registry=registry)
    if http_folder is not None:
        MultiProcessCollector(registry, str(http_folder))  # type: ignore[no-untyped-call]
    return registry


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format, which every scraper reads."""


class MetricsEndpoint:
    """Answers GET /metrics in one format, whatever the client accepts.

    In the others `prometheus_client` replaces the colons in the names of samples.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def metrics(self, request: Request) -> Response:
        text = await to_thread(generate_latest, self._registry)
        return Response(text, headers={"content-type": CONTENT_TYPE})
