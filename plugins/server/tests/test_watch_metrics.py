"""Counts in shared memory, what /metrics shows of them, and the HTTP requests beside them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import threading
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from uvicorn import Server

from nanovllm_core import AsyncLLM, EngineConfig, SamplingParams
from nanovllm_kit import (
    ObserverConformance,
    PluginUnderTest,
    plugin_under_test,
)
from nanovllm_server.guard.drain import handled
from nanovllm_server.server import address, make_server
from nanovllm_server.settings import parse_settings
from nanovllm_server.watch.exposition import HttpMetrics, HttpMetricsMiddleware
from nanovllm_server.watch.metrics import GAUGES, LAYOUT, PREFIX
from nanovllm_server.watch.plugin import PROMETHEUS
from nanovllm_server.watch.testing import call
from nanovllm_server.watch.values import (
    Counter,
    Histogram,
    Layout,
    ValuesFile,
    quantile,
    read_values,
)
from nanovllm_server.watch.watch import observed

DASHBOARD = Path(__file__).parents[1] / "dashboards" / "grafana.json"
DOCUMENT = Path(__file__).parents[3] / "docs" / "monitoring.md"


class TestPrometheusObserver(ObserverConformance):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> PluginUnderTest:
        return plugin_under_test(PROMETHEUS, folder=str(tmp_path))


# ------------------------------------------------------------------------------ values

WORDS = Counter("words", "", label="colour", label_values=("red", "green"))
SIZES = Histogram("sizes", "", (1.0, 2.0, 5.0))
SMALL = Layout((WORDS, SIZES))


def test_files_of_several_writers_are_summed_and_outlive_them(tmp_path: Path) -> None:
    """As engines in processes of their own write them, one of which has ended."""
    for number in (1, 2):
        file = ValuesFile(tmp_path, SMALL)
        file.counter(WORDS).add(number, "green")
        file.histogram(SIZES).add(2.0, times=3)
        file.close()
    (tmp_path / "half.values").write_bytes(b"\0" * 8)
    values = read_values(tmp_path, SMALL)
    assert list(SMALL.part(values, WORDS)) == [0, 3]
    assert list(SMALL.part(values, SIZES)) == [0, 6, 0, 0, 12]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=30),
    share=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    """The exact one is the smallest value that at least `share` of the values do not exceed."""
    bounds = (1.0, 2.0, 5.0, 10.0)
    counts = [0.0] * 5
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    found = quantile(counts, bounds, share)
    exact = next(v for v in sorted(values) if sum(w <= v for w in values) >= share * len(values))
    assert found is not None
    bucket = bisect_left(bounds, exact)
    lower, upper = (0.0, *bounds, 10.0)[bucket], (*bounds, inf)[bucket]
    assert lower <= found <= upper


def test_a_quantile_of_nothing_is_none() -> None:
    assert quantile([0, 0, 0], (1.0, 2.0), 0.5) is None


# ------------------------------------------------------------------------------ /metrics


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def samples(text: str) -> dict[str, float]:
    """Name and labels (without the model's) -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            key = sample.name.removeprefix(PREFIX) + (json.dumps(labels) if labels else "")
            found[key] = sample.value
    return found


async def drain(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
    async for _ in llm.generate(prompt, params):
        pass


def test_metrics_count_what_the_engine_did(llm: AsyncLLM, server_url: str) -> None:
    """Exactly: tokens, requests by reason, prefix hits, and the parts of each request's time."""
    before = samples(get(f"{server_url}/metrics"))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompt = [7] * 33

    async def run() -> None:
        for _ in range(2):
            await drain(llm, prompt, params)
        stream = llm.generate(prompt, SamplingParams(max_tokens=1900, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        await drain(llm, prompt, SamplingParams(temperature=0, max_tokens=1))

    asyncio.run(run())
    after = samples(get(f"{server_url}/metrics"))

    def grew(name: str, **labels: str) -> float:
        key = name + (json.dumps(labels) if labels else "")
        return after[key] - before[key]

    assert grew("request_success_total", finished_reason="length") == 3
    assert grew("request_success_total", finished_reason="abort") == 1
    assert grew("prefix_cache_queries_total") == 4 * 33
    assert grew("prefix_cache_hits_total") == 3 * 32
    assert grew("prompt_tokens_total") == 4 * 33 - 3 * 32
    assert grew("generation_tokens_total") >= 12
    assert grew("request_prompt_tokens_sum") == 4 * 33
    assert grew("time_to_first_token_seconds_count") == 4
    assert grew("request_time_per_output_token_seconds_count") in (2, 3)  # the aborted: 1 or more
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(grew(f"{part}_seconds_sum") for part in parts) == pytest.approx(
        grew("e2e_request_latency_seconds_sum")
    )
    assert grew("inter_token_latency_seconds_count") >= 8
    assert after["engine_healthy"] == 1


def test_metrics_are_those_that_are_declared(server_url: str) -> None:
    """The first scrape may come before any request."""
    names = {PREFIX + metric.name for metric in LAYOUT.metrics}
    names |= {PREFIX + name for name in GAUGES}
    found = {family.name for family in text_string_to_metric_families(get(f"{server_url}/metrics"))}
    assert names <= found


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=values",
        "text/plain; version=x",
        "application/openmetrics-text; version=abc",
    ],
    ids=["Prometheus 2", "Prometheus 3", "escaped values", "no version", "no version either"],
)
def test_every_scraper_reads_the_documented_names(accept: str, server_url: str) -> None:
    """Alerts and dashboards use them, with colons. One format serves all, whatever they accept."""
    answer = httpx.get(f"{server_url}/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = text_string_to_metric_families(answer.text)
    names = {sample.name for family in found for sample in family.samples}
    assert {PREFIX + name for name in GAUGES} <= names
    assert not [name for name in names if name.startswith(PREFIX.replace(":", "_"))]


def families(server_url: str) -> list[Metric]:
    """The metrics of this project, of which some appear with the first request."""
    get(f"{server_url}/health")
    found = text_string_to_metric_families(get(f"{server_url}/metrics"))
    return [one for one in found if one.name.startswith(PREFIX) and one.type != "unknown"]


def test_the_document_lists_every_metric_with_its_type_and_meaning(server_url: str) -> None:
    """As the code states them: no row is missing, and none is left over."""
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\w+) \| (.*) \|$", document, re.MULTILINE)
    stated = {
        (
            one.name.removeprefix(PREFIX) + ("_total" if one.type == "counter" else ""),
            one.type,
            one.documentation,
        )
        for one in families(server_url)
        if not one.name.endswith("_created")
    }
    assert set(rows) == stated


@pytest.mark.parametrize("file", [DASHBOARD, DOCUMENT], ids=["dashboard", "alerts"])
def test_queries_name_metrics_that_exist(file: Path, server_url: str) -> None:
    """Of the dashboard, and of the alerts in the document."""
    used = set(re.findall(rf"{PREFIX}[a-z0-9_]+", file.read_text(encoding="utf-8")))
    samples_of_all = {sample.name for one in families(server_url) for sample in one.samples}
    assert len(used) >= 5
    assert used <= samples_of_all


def test_the_dashboard_has_queries_in_every_panel() -> None:
    """Which Grafana can read: each panel has a place, a title and a query of its own."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    assert all(panel["targets"] for panel in panels)
    for field in ("id", "title"):
        assert len({panel[field] for panel in panels}) == len(panels)


# ------------------------------------------------------------------------------ HTTP


class Toy:
    """An application with a route, a fault, a stream that is left, and a 404."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/things/"):
            scope["route"] = type("Route", (), {"path": "/things/{name}"})()
            await self.answer(send, 200)
        elif scope["path"] == "/fault":
            raise LookupError
        elif scope["path"] == "/left":
            return
        else:
            await self.answer(send, 404 if scope["path"] != "/refused" else 429)

    async def answer(self, send: Any, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})


def test_http_requests_are_counted_by_route_and_status_with_few_labels() -> None:
    """A path with a parameter is one route; a refusal has its path; paths that nobody serves share
    a label, whatever a caller makes up; a client that went counts as 499, a fault as 500."""
    registry = CollectorRegistry()
    app = HttpMetricsMiddleware(Toy(), HttpMetrics(registry), lambda: {"/refused", "/left"})

    async def run() -> None:
        for path in ("/things/a", "/things/b", "/no", "/such", "/refused", "/left"):
            await call(app, path)
        with pytest.raises(LookupError):
            await call(app, "/fault")

    asyncio.run(run())

    def count(handler: str, status: int) -> float | None:
        labels = {"handler": handler, "method": "GET", "status": str(status)}
        return registry.get_sample_value(f"{PREFIX}http_requests_total", labels)

    assert count("/things/{name}", 200) == 2
    assert count("other", 404) == 2
    assert count("/refused", 429) == 1
    assert count("/left", 499) == 1
    assert count("other", 500) == 1
    assert registry.get_sample_value(f"{PREFIX}http_requests_in_progress") == 0


def test_refusals_of_a_full_server_are_in_the_metrics(llm: AsyncLLM) -> None:
    """An alert on 5xx sees them, though none of them reaches the application."""
    settings = parse_settings({"port": 0, "limits": {"max_connections": 1}})
    with running(make_server(llm, settings)) as server, httpx.Client(timeout=10) as first:
        url = address(server)
        assert first.get(f"{url}/version").status_code == 200
        assert httpx.get(f"{url}/version", timeout=10).status_code == 503
        refused, end = 1, time.monotonic() + 10
        while (answer := first.get(f"{url}/metrics")).status_code == 503:
            assert time.monotonic() < end, "the other connection is still there"
            refused += 1
        values = samples(answer.text)
    labels = {"handler": "other", "method": "other", "status": "503"}
    assert values["http_requests_total" + json.dumps(labels)] == refused


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """The server, on a thread."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_a_signal_leaves_no_folder_behind_even_as_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a server by SystemExit, between any two instructions."""
    made = []

    def made_and_ended(folder: Path, mode: int = 0o777) -> None:
        os.mkdir(folder, mode)
        made.append(folder)
        raise SystemExit(0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", made_and_ended)
    with pytest.raises(SystemExit), observed(EngineConfig.model_validate({"model": "demo"})):
        raise AssertionError("not ended")
    assert len(made) == 1
    assert [*tmp_path.iterdir()] == []


def test_ctrl_c_leaves_no_folder_behind_where_it_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command does in the midst of an import, where no `finally` runs."""
    left: list[list[Path]] = []

    def end_at_once(*_: object) -> None:
        left.append([*tmp_path.iterdir()])

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with handled((signal.SIGINT,), end_at_once):
        with observed(EngineConfig.model_validate({"model": "demo"})):
            assert len([*tmp_path.iterdir()]) == 1
            signal.raise_signal(signal.SIGINT)
        assert left == [[]]
        assert signal.getsignal(signal.SIGINT) is end_at_once


def test_a_process_that_ignores_ctrl_c_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one below `nohup`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with observed(EngineConfig.model_validate({"model": "demo"})):
            signal.raise_signal(signal.SIGINT)
            assert len([*tmp_path.iterdir()]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
