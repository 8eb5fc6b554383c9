"""The loads of one `nanovllm bench serve`, one after the other, and their record."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from nanovllm_bench.environment import describe_environment
from nanovllm_bench.latency import WARM_UP_REQUESTS, Arrivals, arrival_times
from nanovllm_bench.serve.client import Endpoint, Request
from nanovllm_bench.serve.load import LongPrompts, Share
from nanovllm_bench.serve.processes import carry
from nanovllm_bench.serve.summary import Objectives, summarise
from nanovllm_bench.workloads import Workload
from nanovllm_core.errors import NanoVLLMError

LOOK_SECONDS = 30.0
"""For an endpoint to say what it serves."""
MAX_LOADS = 97
"""Of one seed, before prompts are those of the next. A prime, so that the ids of a small
vocabulary do not come round."""


class EndpointError(NanoVLLMError):
    """The endpoint is not there, or does not answer as OpenAI's do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: each level of clients or of requests per second is a load of its own."""

    workload: Workload
    clients: Sequence[int] = ()
    rates: Sequence[float] = ()
    arrivals: Arrivals = "poisson"
    seed: int = 0
    processes: int = 1
    warm_up: int = WARM_UP_REQUESTS
    long_prompts: LongPrompts | None = None
    objectives: Objectives = field(default_factory=Objectives)
    exact_lengths: bool = True


def measure_endpoint(
    endpoint: Endpoint, plan: Plan, on_run: Callable[[dict[str, Any]], None] = lambda _run: None
) -> dict[str, Any]:
    """Carry the loads of a plan one after the other; the record of a result file.

    No two loads, and no warm-up, share a prompt: what an endpoint's prefix cache kept of one helps
    none of the others. `on_run` gets the figures of each load when it is over.
    """
    runs: list[dict[str, Any]] = []
    for index, level in enumerate([*plan.clients, *plan.rates]):
        clients = int(level) if index < len(plan.clients) else None
        load = _load(endpoint, plan, plan.seed * MAX_LOADS + index, clients, float(level))
        outcomes = carry(load, plan.processes)
        runs.append(
            {
                "load": "open" if clients is None else "closed",
                "clients": clients,
                "rate": float(level) if clients is None and math.isfinite(level) else None,
                "arrivals": plan.arrivals if clients is None else None,
                **summarise(outcomes, plan.objectives, exact_lengths=plan.exact_lengths),
            }
        )
        on_run(runs[-1])
    return {
        "benchmark": "serve",
        "workload": plan.workload.name,
        "seed": plan.seed,
        "prompts": endpoint.prompts,
        "body": dict(endpoint.body),
        "endpoint": describe_endpoint(endpoint),
        "environment": describe_environment(),
        "runs": runs,
    }


def _load(endpoint: Endpoint, plan: Plan, turn: int, clients: int | None, rate: float) -> Share:
    """A load whose prompts no other `turn` has."""
    workload = plan.workload.relabelled(2 * turn)
    count = len(workload.prompts)
    times: list[float | None] = [None] * count
    if clients is None:
        times = [*arrival_times(count, rate, plan.arrivals, plan.seed)]
    return Share(
        endpoint,
        requests_of(workload, times),
        clients,
        requests_of(workload.relabelled(1), [None] * min(plan.warm_up, count)),
        plan.long_prompts and replace(plan.long_prompts, seed=turn),
    )


def requests_of(workload: Workload, times: Sequence[float | None]) -> list[Request]:
    """The first `len(times)` requests of a workload."""
    return [*map(Request, workload.prompts[: len(times)], workload.output_lens, times)]


def describe_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    """URL, model, and what the endpoint says of itself."""
    version = asyncio.run(_get_json(endpoint, "/version"))
    return {"url": endpoint.url, "model": endpoint.model, "version": version}


def served_model(endpoint: Endpoint) -> str:
    """The first model that the endpoint lists; EndpointError where it lists none."""
    models = asyncio.run(_get_json(endpoint, "/v1/models"))
    try:
        return str(models["data"][0]["id"])
    except (TypeError, LookupError):
        raise EndpointError(
            f"{endpoint.url}/v1/models lists no model; is this an OpenAI-compatible endpoint that "
            "runs, and does it want an API key (OPENAI_API_KEY)? Otherwise name its --model"
        ) from None


async def _get_json(endpoint: Endpoint, path: str) -> Any:
    """The JSON of a path, or None where there is none."""
    try:
        async with (
            asyncio.timeout(LOOK_SECONDS),
            endpoint.open_session() as session,
            session.get(path) as response,
        ):
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
