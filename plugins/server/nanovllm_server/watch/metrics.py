"""The engine's metrics: what each is called and means. docs/monitoring.md lists them from here.

The stems are those of vLLM's metrics, so that its dashboards and alerts need only a new prefix.
Counters and histograms come from the observer `prometheus`; the server itself counts the requests
that end with their engine. Gauges are read from the engine's counters when /metrics is asked for.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

from nanovllm_core.api import RequestRecord
from nanovllm_server.watch.values import Counter, Histogram, Layout, bounds_between

PREFIX = "nanovllm:"

FINISH_REASONS: tuple[str, ...] = get_args(get_type_hints(RequestRecord)["finish_reason"])

SECONDS = bounds_between(0.001, 1000)
SHORT_SECONDS = bounds_between(0.0001, 10)
TOKENS = tuple(float(2**power) for power in range(21))

PROMPT_TOKENS = Counter(
    "prompt_tokens",
    "Prompt tokens computed: without those found in the prefix cache, and again after preemption.",
)
GENERATION_TOKENS = Counter("generation_tokens", "Tokens generated.")
PREEMPTIONS = Counter("num_preemptions", "Requests that lost their row and blocks for others.")
PREFIX_QUERIES = Counter(
    "prefix_cache_queries", "Prompt tokens of admitted requests that are over."
)
PREFIX_HITS = Counter(
    "prefix_cache_hits", "Those of `prefix_cache_queries` that were in the prefix cache."
)
REQUESTS = Counter(
    "request_success",
    "Requests that are over, by reason: stop, length, abort, error. Each sample counts.",
    label="finished_reason",
    label_values=FINISH_REASONS,
)
STEP_SECONDS = Histogram(
    "engine_step_seconds", "Elapsed time of each step: since the step before.", SHORT_SECONDS
)
STEP_TOKENS = Histogram(
    "iteration_tokens", "Tokens computed in each step: of prompts, and one for each row.", TOKENS
)
QUEUE_SECONDS = Histogram(
    "request_queue_time_seconds", "From a request's arrival to its first admission.", SECONDS
)
FIRST_TOKEN_SECONDS = Histogram(
    "time_to_first_token_seconds",
    "From a request's arrival at the engine to its first token.",
    SECONDS,
)
PREFILL_SECONDS = Histogram(
    "request_prefill_time_seconds", "From a request's first admission to its first token.", SECONDS
)
DECODE_SECONDS = Histogram(
    "request_decode_time_seconds", "From a request's first token to its last.", SECONDS
)
REQUEST_SECONDS = Histogram(
    "e2e_request_latency_seconds", "From a request's arrival at the engine to its end.", SECONDS
)
INTER_TOKEN_SECONDS = Histogram(
    "inter_token_latency_seconds",
    "Between two tokens of a request: each step's time, once for each row that decoded in it.",
    SHORT_SECONDS,
)
TOKEN_SECONDS = Histogram(
    "request_time_per_output_token_seconds",
    "Of a request with at least two tokens: the mean time between them.",
    SHORT_SECONDS,
)
REQUEST_PROMPT_TOKENS = Histogram(
    "request_prompt_tokens", "Prompt tokens of a request, cached ones among them.", TOKENS
)
REQUEST_GENERATION_TOKENS = Histogram(
    "request_generation_tokens", "Tokens that a request generated.", TOKENS
)

LAYOUT = Layout(
    (
        PROMPT_TOKENS,
        GENERATION_TOKENS,
        PREEMPTIONS,
        PREFIX_QUERIES,
        PREFIX_HITS,
        REQUESTS,
        STEP_SECONDS,
        STEP_TOKENS,
        QUEUE_SECONDS,
        FIRST_TOKEN_SECONDS,
        PREFILL_SECONDS,
        DECODE_SECONDS,
        REQUEST_SECONDS,
        INTER_TOKEN_SECONDS,
        TOKEN_SECONDS,
        REQUEST_PROMPT_TOKENS,
        REQUEST_GENERATION_TOKENS,
    )
)
"""Of the file of one engine."""

GAUGES = {
    "num_requests_running": "Requests (samples) that have a row.",
    "num_requests_waiting": "Requests (samples) that wait for a row.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use, from 0 to 1.",
    "num_kv_cache_blocks": "Blocks of the KV cache.",
    "num_engines": "Engines that run; `data_parallel_size` less those that have ended.",
    "engine_healthy": "1 where /health answers 200, else 0.",
    "engine_last_answer_age_seconds": "Time since the engine last answered, as /health judges it.",
}
"""Name -> meaning of the engine's state now."""
