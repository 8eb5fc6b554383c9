"""Traces: a span for the HTTP request, in it one for the engine's, in the trace of the client."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing` of nanovllm-server")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nanovllm_core import AsyncLLM
from nanovllm_kit import ObserverConformance, PluginUnderTest, plugin_under_test
from nanovllm_server.app import make_app
from nanovllm_server.settings import parse_settings
from nanovllm_server.watch import tracing
from nanovllm_server.watch.plugin import OPENTELEMETRY
from nanovllm_server.watch.testing import call
from nanovllm_server.watch.trace_context import current, trace_labels

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What would be sent, of all providers that a test makes."""
    exporter = InMemorySpanExporter()

    def make_provider(endpoint: str | None, service_name: str) -> TracerProvider:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return provider

    monkeypatch.setattr(tracing, "make_provider", make_provider)
    return exporter


class TestTraceObserver(ObserverConformance):
    @pytest.fixture(autouse=True)
    def _in_memory(self, spans: InMemorySpanExporter) -> None:
        """No span leaves the test."""

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(OPENTELEMETRY)


def hexadecimal(span: ReadableSpan) -> tuple[str, str, str]:
    """The ids of its trace, of itself and of its parent."""
    context = span.get_span_context()
    assert context is not None
    parent = "" if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent


def test_a_request_has_a_span_of_http_and_in_it_one_of_the_engine(
    spans: InMemorySpanExporter,
) -> None:
    """In the client's trace; the engine's has the times of admission and first token as events."""
    observers = [{"name": "opentelemetry"}]
    llm = AsyncLLM("demo", device="cpu", limits={"max_num_seqs": 2}, observers=observers)
    with closing(llm):
        application = make_app(llm, parse_settings({"tracing": {}}))
        app = application.state.watch.wrap_requests(application)
        body = {"model": "demo", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "n": 2}
        headers = {"traceparent": TRACEPARENT, "content-type": "application/json"}
        asyncio.run(call(app, "/v1/completions", "POST", json.dumps(body).encode(), headers))
    engine = [span for span in spans.get_finished_spans() if span.name == "engine.request"]
    [http] = [span for span in spans.get_finished_spans() if span not in engine]
    trace, own, parent = hexadecimal(http)
    assert (http.name, trace, parent) == ("POST /v1/completions", TRACE, PARENT)
    assert dict(http.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert [hexadecimal(span)[::2] for span in engine] == [(TRACE, own)] * 2
    for span in engine:
        attributes = dict(span.attributes or {})
        assert attributes["gen_ai.usage.input_tokens"] == 2
        assert attributes["gen_ai.usage.output_tokens"] == 3
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        admitted, first = span.events
        assert (admitted.name, first.name) == ("admitted", "first token")
        times = [
            http.start_time,
            span.start_time,
            admitted.timestamp,
            first.timestamp,
            span.end_time,
        ]
        assert None not in times
        assert times == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_header_that_names_no_trace_begins_one(header: str, spans: InMemorySpanExporter) -> None:
    """What a client sends may be anything; an error of the server marks the span."""
    seen: list[dict[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(trace_labels())
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = tracing.TracingMiddleware(app, tracing.make_provider(None, ""))
    asyncio.run(call(middleware, "/who/knows?prompt=secret", headers={"traceparent": header}))
    [span] = spans.get_finished_spans()
    trace, own, parent = hexadecimal(span)
    assert parent == ""
    assert seen == [{"traceparent": f"00-{trace}-{own}-{seen[0]['traceparent'][-2:]}"}]
    assert not span.status.is_ok
    assert "secret" not in span.to_json()


def test_what_an_exception_says_is_in_no_span(spans: InMemorySpanExporter) -> None:
    """A fault of the server may hold a part of the prompt; the span has the fact alone."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("a secret prompt")

    middleware = tracing.TracingMiddleware(app, tracing.make_provider(None, ""))
    with pytest.raises(LookupError):
        asyncio.run(call(middleware, "/v1/completions", "POST"))
    [span] = spans.get_finished_spans()
    assert not span.status.is_ok
    assert "secret" not in span.to_json()
    assert (span.attributes or {}).get("http.response.status_code") == 500


def test_the_server_makes_no_spans_but_its_own(
    llm: AsyncLLM, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI has telemetry of its own, on where the process has a provider: it would see queries
    and the texts of exceptions, and stand in the way of each part of a stream."""
    provider = tracing.make_provider(None, "")
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    app = make_app(llm, parse_settings({}))
    asyncio.run(call(app, "/v1/models"))
    assert spans.get_finished_spans() == ()


def test_a_collector_that_is_gone_does_not_keep_the_engine_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does not take in the given time is lost; the engine counts as hung if it does not
    close."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    provider = tracing.make_provider("http://127.0.0.1:9/v1/traces", "nanovllm")
    provider.get_tracer("test").start_span("engine.request").end()
    began = time.monotonic()
    tracing.close_provider(provider)
    assert time.monotonic() - began < 1


def test_without_a_trace_a_request_has_no_label() -> None:
    """So that an engine without tracing carries nothing."""
    assert current.get() == ""
    assert trace_labels() == {}
