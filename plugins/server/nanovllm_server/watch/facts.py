"""GET /version, /plugins and /live: what runs here, why, and how it does at this moment."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm_core import AsyncLLM
from nanovllm_core.api import ResolvedPlugin
from nanovllm_core.selection import Decisions
from nanovllm_server.watch import metrics
from nanovllm_server.watch.health import EngineMonitor
from nanovllm_server.watch.used_plugins import (
    CLIENT,
    UsedPlugin,
    describe,
    engine_plugins,
    read_plugins,
)
from nanovllm_server.watch.values import Histogram, quantile, read_values

if TYPE_CHECKING:
    from nanovllm_core.engine import EngineStats

WINDOW_S = 10.0
"""What rates and percentiles of /live are over."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class LiveFacts:
    """The engine's counters over the last seconds. `sample` is called on the monitor's thread."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        """Of the counts of the engine's observer; None where it has no such observer."""
        self._samples: deque[tuple[float, EngineStats, array[float]]] = deque()

    def sample(self, stats: EngineStats) -> None:
        """The engine's counters now."""
        now, counts = monotonic(), array("d", bytes(8 * metrics.LAYOUT.size))
        if self._folder is not None:
            counts = read_values(self._folder, metrics.LAYOUT)
        self._samples.append((now, stats, counts))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()

    def now(self) -> dict[str, Any]:
        """What /live answers. A rate, share or percentile of nothing is None.

        Times are in milliseconds, shares from 0 to 1. `running`, `waiting` and `kv_usage` are as
        the engine last answered; the rest is of its answers in the last `WINDOW_S` seconds.
        """
        samples, first = tuple(self._samples), monotonic() - WINDOW_S
        if not samples:
            return {}
        ended, stats, after = last = samples[-1]
        began, earlier, before = next((one for one in samples if one[0] >= first), last)
        window = [new - old for new, old in zip(after, before, strict=True)]
        steps = metrics.LAYOUT.part(window, metrics.STEP_SECONDS)
        [asked] = metrics.LAYOUT.part(window, metrics.PREFIX_QUERIES)
        [hit] = metrics.LAYOUT.part(window, metrics.PREFIX_HITS)
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": 1 - stats.free_blocks / stats.blocks,
            "tokens_per_second": _ratio(
                max(0, stats.output_tokens - earlier.output_tokens), ended - began
            ),
            "step_ms": _ratio(1000 * steps[-1], sum(steps[:-1])),
            "prefix_hit_rate": _ratio(hit, asked),
            "first_token_ms": _percentiles(window, metrics.FIRST_TOKEN_SECONDS),
            "inter_token_ms": _percentiles(window, metrics.INTER_TOKEN_SECONDS),
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(window: Sequence[float], metric: Histogram) -> dict[str, float | None]:
    counts = metrics.LAYOUT.part(window, metric)[:-1]
    found = {name: quantile(counts, metric.bounds, share) for name, share in PERCENTILES.items()}
    return {name: None if value is None else 1000 * value for name, value in found.items()}


def versions() -> dict[str, str]:
    """The versions of this server and of what it stands on."""
    names = ("nanovllm-core", "nanovllm-server", "torch")
    core, server, torch = map(version, names)
    return {"version": core, "server": server, "torch": torch}


def plugins_in_use(
    llm: AsyncLLM,
    folder: Path | None,
    routes: Sequence[ResolvedPlugin] = (),
    clients: Sequence[UsedPlugin] = (),
) -> dict[str, Any]:
    """What /plugins answers: the plugins that serve, and why these attention and kernels.

    `folder` is where the engine's observer noted its plugins; None where it has no such observer.
    `clients` are the engine clients of the process that has the engine, where that is another one.
    """
    choices = llm.info.choices
    used = engine_plugins(llm.config) if folder is None else read_plugins(folder)
    used += [*describe(CLIENT, Decisions(llm.config).named(CLIENT)), *clients]
    used += describe("route", routes)
    reasons = {line.partition(":")[0]: line for line in reversed(choices)}
    plugins = [{**one, "reason": reasons.get(one["kind"], "")} for one in used]
    return {"plugins": plugins, "choices": list(choices)}


class FactsEndpoints:
    """GET /version, /plugins and /live."""

    def __init__(self, live: LiveFacts, monitor: EngineMonitor, plugins: dict[str, Any]) -> None:
        self._live = live
        self._monitor = monitor
        self._plugins = plugins

    async def version(self, request: Request) -> Response:
        return JSONResponse(versions())

    async def plugins(self, request: Request) -> Response:
        return JSONResponse(self._plugins)

    async def live(self, request: Request) -> Response:
        """`problem` is the reason for which /health answers 503, None where it does not."""
        return JSONResponse({"problem": self._monitor.problem, **self._live.now()})
