"""Traces by OpenTelemetry: a span for each HTTP request, in it one for each request to the engine.

Imported only where `serve.tracing` is set: it needs the extra `tracing`. The engine's span is made
from its record when it is over, by an observer, so that it is also there where the engine lives in
another process. A request's label says which span is its parent.
"""

from __future__ import annotations

import threading
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nanovllm_core.api import ObserverContext, RequestRecord, StepObserver, StepRecord
from nanovllm_server.watch import trace_context
from nanovllm_server.watch.exposition import AnswerWatch
from nanovllm_server.watch.plugin import TraceOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PROPAGATOR = TraceContextTextMapPropagator()
HEADERS = (b"traceparent", b"tracestate")
CLOSE_S = 2.0


def make_provider(endpoint: str | None, service_name: str) -> TracerProvider:
    """Sends spans to an endpoint, in batches, on a thread of its own."""
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def close_provider(provider: TracerProvider) -> None:
    """Send what is left for `CLOSE_S` seconds at most; the rest is lost.

    Its own `shutdown` tries each batch again and again, and takes up to 30 seconds.
    """
    closing = threading.Thread(target=provider.shutdown, name="nanovllm-spans", daemon=True)
    closing.start()
    closing.join(CLOSE_S)


class TracingMiddleware:
    """A span for each HTTP request (pure ASGI); its parent is what the headers name."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer("nanovllm_server")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in HEADERS
        }
        watch = AnswerWatch(send)
        # What an exception says may be a part of the prompt: the span has none of it.
        with self._tracer.start_as_current_span(
            scope["method"],
            PROPAGATOR.extract(headers),
            SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            token = trace_context.current.set(traceparent(span))
            try:
                await self._app(scope, receive, watch.send)
            except BaseException:
                watch.status = watch.status or 500
                span.set_status(StatusCode.ERROR)
                raise
            finally:
                trace_context.current.reset(token)
                describe(span, scope, watch.status or 499)


def describe(span: Span, scope: Scope, status: int) -> None:
    """The attributes of an HTTP span: no query, no body, no address. 499: the client has gone."""
    route = getattr(scope.get("route"), "path", "")
    if route:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.request.method", scope["method"])
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def traceparent(span: Span) -> str:
    """A span as the header of the same name writes it."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier[trace_context.LABEL]


class TraceObserver(StepObserver):
    """A span for each request to the engine, from its arrival to its end."""

    def __init__(self, options: TraceOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self._provider = make_provider(options.endpoint, options.service_name)
        self._tracer = self._provider.get_tracer("nanovllm_server")
        self._model = context.config.model

    def on_step(self, record: StepRecord) -> None:
        """Steps have no spans."""

    def on_request_finished(self, record: RequestRecord) -> None:
        # A record's times are those of perf_counter.
        zero = time_ns() - perf_counter_ns()

        def at(seconds: float) -> int:
            return zero + int(seconds * 1e9)

        span = self._tracer.start_span(
            "engine.request",
            PROPAGATOR.extract(record.labels),
            SpanKind.INTERNAL,
            start_time=at(record.arrival_time),
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.finish_reasons": [record.finish_reason],
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_output_tokens,
                "nanovllm.sample": record.index,
                "nanovllm.cached_tokens": record.num_cached_tokens,
                "nanovllm.preemptions": record.num_preemptions,
            },
        )
        if record.first_scheduled_time is not None:
            span.add_event("admitted", timestamp=at(record.first_scheduled_time))
        if record.first_token_time is not None:
            span.add_event("first token", timestamp=at(record.first_token_time))
        if record.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(at(record.finished_time))

    def close(self) -> None:
        """Send what is left."""
        close_provider(self._provider)
