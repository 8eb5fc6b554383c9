"""Latency under a steady arrival of requests: time to first token, and time between tokens.

The requests go through `AsyncLLM`, as a server's do: one event loop serves them all, beside the
thread that takes the steps. A token counts as seen when the loop has its output. A request's clock
starts when it arrives, also when the engine or the loop is busy at that moment.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from nanovllm_bench.record import describe_engine
from nanovllm_bench.throughput import Gauge
from nanovllm_bench.workloads import Workload
from nanovllm_core.errors import ConfigError
from nanovllm_core.frontend import AsyncLLM
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams

Arrivals = Literal["fixed", "poisson"]
PERCENTILES = (50, 90, 99)
WARM_UP_REQUESTS = 8


def arrival_times(count: int, rate: float, arrivals: Arrivals, seed: int = 0) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` per second: evenly, or as a Poisson process.

    An infinite rate lets all arrive at once.
    """
    if not rate > 0:
        raise ConfigError(f"rate is {rate}; it must be above 0 requests per second")
    if arrivals == "fixed" or rate == float("inf"):
        return [index / rate for index in range(count)]
    rng, times, now = random.Random(seed), [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


@dataclass(slots=True)
class Trace:
    """When each request arrived, and when each of its tokens was seen, in seconds."""

    arrivals: list[float]
    seen: list[list[float]]

    def first_token_ms(self) -> list[float]:
        """Time to first token of every request."""
        pairs = zip(self.seen, self.arrivals, strict=True)
        return [1e3 * (seen[0] - arrived) for seen, arrived in pairs]

    def inter_token_ms(self) -> list[float]:
        """Time between neighbouring tokens of every request, one request after the other."""
        return [1e3 * (later - earlier) for seen in self.seen for earlier, later in pairwise(seen)]


async def trace_requests(
    llm: AsyncLLM, workload: Workload, arrivals: Sequence[float], temperature: float
) -> Trace:
    """Send the requests at their times and note when each of their tokens is seen."""
    loop, is_over = asyncio.get_running_loop(), threading.Event()
    arrived = [loop.create_future() for _ in arrivals]
    started = time.perf_counter()

    def send() -> None:
        # On a thread, for an event loop's own timers are up to a millisecond late.
        for arrival, future in zip(arrivals, arrived, strict=True):
            if is_over.wait(max(0.0, started + arrival - time.perf_counter())):
                return
            loop.call_soon_threadsafe(future.set_result, None)

    async def follow(index: int) -> list[float]:
        params = SamplingParams(
            **{**NEUTRAL, "temperature": temperature},
            max_tokens=workload.output_lens[index],
            ignore_eos=True,
        )
        seen: list[float] = []
        await arrived[index]
        async for output in llm.generate(workload.prompts[index], params):
            seen += [time.perf_counter() - started] * len(output.new_token_ids)
        return seen

    try:
        sending = asyncio.to_thread(send)
        seen, _ = await asyncio.gather(asyncio.gather(*map(follow, range(len(arrivals)))), sending)
    finally:
        is_over.set()
    return Trace(list(arrivals), seen)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by linear interpolation."""
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in PERCENTILES}


def measure_latency(
    llm: AsyncLLM,
    workload: Workload,
    *,
    rate: float,
    arrivals: Arrivals = "poisson",
    seed: int = 0,
    temperature: float = 0.6,
) -> dict[str, Any]:
    """One run of the workload at `rate` requests per second; the record of a result file.

    A few of the requests run first, all at once, and are not counted. `rate` is None in the record
    where all arrive at once. `mean_running` is output tokens per step, of one engine where there
    are several. The share is the floor of a decode step of that batch and the mean context, over
    the median time between tokens.
    """
    shortest = min(workload.output_lens)
    if shortest < 2:
        raise ConfigError(
            f"the shortest output is {shortest} token, and between tokens of one is no time; ask "
            "for at least 2"
        )
    workload = workload.within(llm.info.vocab_size)
    gauge = Gauge.of(llm)
    few = slice(0, WARM_UP_REQUESTS)
    warm_up = Workload("", workload.prompts[few], workload.output_lens[few])
    asyncio.run(trace_requests(llm, warm_up, [0.0] * len(warm_up.prompts), temperature))
    llm.reset_prefix_cache()
    times = arrival_times(len(workload.prompts), rate, arrivals, seed)
    steps = llm.stats.steps
    with gauge.utilisation() as utilisation:
        trace = asyncio.run(trace_requests(llm, workload, times, temperature))
    first, between = trace.first_token_ms(), trace.inter_token_ms()
    mean_rows = workload.num_output_tokens / (llm.stats.steps - steps)
    context = sum(p + o / 2 for p, o in workload.lengths) / len(workload.lengths)
    seconds = max(seen[-1] for seen in trace.seen)
    return {
        "benchmark": "latency",
        "workload": workload.name,
        "num_seqs": len(workload.prompts),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "temperature": temperature,
        "arrivals": arrivals,
        "rate": rate if math.isfinite(rate) else None,
        "seed": seed,
        "ttft_ms": percentiles(first),
        "inter_token_ms": percentiles(between),
        "tokens_per_second": round(workload.num_output_tokens / seconds, 1),
        "mean_running": round(mean_rows, 2),
        "mean_context": round(context, 1),
        "gpu_utilisation": utilisation.mean,
        "peak_memory_gib": gauge.peak_memory_gib(),
        "roofline": gauge.step_roofline(mean_rows, context, float(np.median(between)) * 1e-3),
        **describe_engine(llm),
        "raw_ttft_ms": [round(ms, 3) for ms in first],
        "raw_inter_token_ms": [round(ms, 3) for ms in between],
    }
