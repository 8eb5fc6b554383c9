"""Everything that watches one server, as the application and the command use it."""

from __future__ import annotations

import signal
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route, Router

from nanovllm_core import AsyncLLM, EngineConfig
from nanovllm_core.api import ConfigError
from nanovllm_engine_processes.held_folder import HeldFolder, make_again
from nanovllm_server.guard.drain import handled
from nanovllm_server.watch.exposition import (
    OTHER,
    EngineCollector,
    HttpMetrics,
    HttpMetricsMiddleware,
    MetricsEndpoint,
    make_registry,
)
from nanovllm_server.watch.facts import FactsEndpoints, LiveFacts, plugins_in_use
from nanovllm_server.watch.health import EngineMonitor, HealthEndpoints, close_within
from nanovllm_server.watch.metrics import LAYOUT, REQUESTS
from nanovllm_server.watch.plugin import OPENTELEMETRY, PROMETHEUS
from nanovllm_server.watch.route_plugins import RoutePlugins
from nanovllm_server.watch.routes import RouteContext
from nanovllm_server.watch.values import ValuesFile

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp

    from nanovllm_server.fronts.facts import FrontFacts
    from nanovllm_server.service import Service
    from nanovllm_server.watch.settings import TracingSettings


METRICS_PREFIX = "nanovllm-metrics-"
"""Of the names of the folders in which servers count."""


@contextmanager
def observed(
    config: EngineConfig, tracing: TracingSettings | None = None
) -> Iterator[EngineConfig]:
    """The configuration with the server's observers. Their private folder goes at the end."""
    held = HeldFolder(METRICS_PREFIX)
    try:
        with removed_by_ctrl_c(held):
            options = {"folder": str(held.path)}
            added: list[dict[str, Any]] = [{"name": PROMETHEUS.name, "options": options}]
            if tracing is not None:
                added.append({"name": OPENTELEMETRY.name, "options": tracing.model_dump()})
            values = {"model": config.model, "observers": added}
            ours = EngineConfig.model_validate(values).observers
            yield config.model_copy(update={"observers": (*config.observers, *ours)})
    finally:
        held.remove()


@contextmanager
def removed_by_ctrl_c(held: HeldFolder) -> Iterator[None]:
    """Inside, Ctrl-C removes the folder before its own handler is called.

    In the midst of an import that of the command ends the process at once, without any `finally`.
    """
    go_on = signal.getsignal(signal.SIGINT)
    if not callable(go_on) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def remove_and_go_on(number: int, frame: FrameType | None) -> None:
        held.remove()
        go_on(number, frame)

    with handled((signal.SIGINT,), remove_and_go_on):
        yield


def folder_of(config: EngineConfig) -> Path | None:
    """Where the engine's observer counts; None for an engine that was made without it."""
    options = [one.options for one in config.observers if one.plugin == PROMETHEUS.name]
    return Path(options[0]["folder"]) if options else None


class Watch:
    """What watches the engine of `service`, and the plugins with routes.

    `front` is what this process has in common with others of the same server. `connect` tells it of
    the server that runs the application.
    """

    def __init__(self, service: Service, front: FrontFacts) -> None:
        llm, settings = service.llm, service.settings
        folder, model_name = folder_of(llm.config), service.names[0]
        self._service = service
        self._folder = folder
        self._lost: ValuesFile | None = None
        """Where this process counts the requests that end with their engine."""
        self._count_lost()
        self._given = llm
        self._stop_server: Callable[[], None] = lambda: None
        live = LiveFacts(folder)
        self.monitor = EngineMonitor(
            llm,
            settings.health,
            sample=live.sample,
            prepare=self._prepare,
            replace=self._replace,
            end=lambda error: self._stop_server(),
        )
        registry = make_registry(
            EngineCollector(folder, model_name, self._gauges), front.http_folder, front.process_ids
        )
        self._http = HttpMetrics(registry if front.http_folder is None else None)
        self._metrics = MetricsEndpoint(registry)
        self._health = HealthEndpoints(self.monitor)
        context = RouteContext(engine=lambda: service.llm, model_name=model_name)
        self._plugins = RoutePlugins(settings.routes, context, llm.config.plugins.disable)
        plugins = plugins_in_use(llm, folder, self._plugins.resolved, front.clients)
        self._facts = FactsEndpoints(live, self.monitor, plugins)
        self._provider = make_tracing(settings.tracing)
        self._paths: frozenset[str] = frozenset()

    def connect(self, stop: Callable[[], None], is_draining: Callable[[], bool]) -> None:
        """`stop` ends the server: it is called on another thread once the engine has ended."""
        self._stop_server = stop
        self.monitor.is_draining = is_draining

    def routes(self) -> list[BaseRoute]:
        """The routes of health, metrics and facts."""
        return [
            Route("/health", self._health.health),
            Route("/ready", self._health.ready),
            Route("/metrics", self._metrics.metrics),
            Route("/version", self._facts.version),
            Route("/plugins", self._facts.plugins),
            Route("/live", self._facts.live),
        ]

    def add_plugin_routes(self, router: Router) -> None:
        """Add the plugins' routes, once the server's own are there."""
        self._plugins.add_routes(router)
        self._paths = frozenset(getattr(route, "path", "") for route in router.routes)

    def wrap_plugins(self, app: ASGIApp) -> ASGIApp:
        """The plugins' middleware: inside of keys, limits and all else."""
        return self._plugins.wrap(app)

    def wrap_requests(self, app: ASGIApp) -> ASGIApp:
        """Metrics and traces of HTTP: outside of keys and limits, so that refusals count."""
        if self._provider is not None:
            from nanovllm_server.watch.tracing import TracingMiddleware

            app = TracingMiddleware(app, self._provider)
        return HttpMetricsMiddleware(app, self._http, self._paths_of_routes)

    def count_refusal(self, status: int) -> None:
        """Count an answer that a connection gave without the application."""
        self._http.requests.labels(OTHER, OTHER, status).inc()

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Watch the engine while the server runs."""
        self.monitor.start()
        try:
            yield
        finally:
            await to_thread(self.monitor.stop)
            try:
                await self._plugins.close()
            finally:
                await self._close()

    async def _close(self) -> None:
        """Send the last spans, and close the engine that took the place of the given one."""
        if self._provider is not None:
            from nanovllm_server.watch.tracing import close_provider

            await to_thread(close_provider, self._provider)
        if self._service.llm is not self._given:
            seconds = self._service.settings.health.stuck_after_s
            await to_thread(close_within, self._service.llm, seconds)

    def _prepare(self) -> None:
        """The new engine needs the folder, and another program may have removed it."""
        if self._folder is not None:
            make_again(self._folder)

    def _replace(self, llm: AsyncLLM) -> None:
        self._service.llm = llm
        self._count_lost()

    def _count_lost(self) -> None:
        """Count in a file, and in another one where the first was removed with its folder."""
        if self._folder is None or (self._lost is not None and self._lost.path.exists()):
            return
        self._lost = ValuesFile(self._folder, LAYOUT)
        requests = self._lost.counter(REQUESTS)
        self._service.count_lost = partial(requests.add, label_value="error")

    def _paths_of_routes(self) -> frozenset[str]:
        return self._paths

    def _gauges(self) -> Mapping[str, float]:
        """The engine's state, as it last answered."""
        monitor = self.monitor
        state = {
            "engine_healthy": float(monitor.problem is None),
            "engine_last_answer_age_seconds": monitor.age,
        }
        if (stats := monitor.stats) is None:
            return state
        return {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "kv_cache_usage_perc": 1 - stats.free_blocks / stats.blocks,
            "num_kv_cache_blocks": stats.blocks,
            "num_engines": len(stats.engines) or 1,
            **state,
        }


def make_tracing(settings: TracingSettings | None) -> TracerProvider | None:
    """The spans of HTTP; ConfigError where the packages of the extra `tracing` are missing."""
    if settings is None:
        return None
    try:
        from nanovllm_server.watch.tracing import make_provider
    except ImportError as error:
        raise ConfigError(
            f"serve.tracing is set, and {error.name} is not installed; pip install "
            '"nanovllm-server[tracing]", or leave serve.tracing out'
        ) from error
    return make_provider(settings.endpoint, settings.service_name)
