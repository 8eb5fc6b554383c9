"""The observer `prometheus`: adds each step and each request to the engine's file of values.

At the start it notes the engine's plugins beside the file, for /plugins.
"""

from __future__ import annotations

from nanovllm_core.api import (
    ConfigError,
    ObserverContext,
    RequestRecord,
    StepObserver,
    StepRecord,
)
from nanovllm_server.watch import metrics
from nanovllm_server.watch.plugin import PrometheusOptions
from nanovllm_server.watch.used_plugins import note_plugins
from nanovllm_server.watch.values import ValuesFile


class PrometheusObserver(StepObserver):
    """Adds to shared memory only: no lock, no system call, so that a step waits microseconds."""

    def __init__(self, options: PrometheusOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        try:
            note_plugins(options.folder, context.config)
            values = self._file = ValuesFile(options.folder, metrics.LAYOUT)
        except OSError as error:
            raise ConfigError(
                f"a file of metrics cannot be made in the folder {options.folder} ({error}); give "
                "the observer prometheus a folder that exists and can be written to"
            ) from error
        self._prompt_tokens = values.counter(metrics.PROMPT_TOKENS)
        self._generation_tokens = values.counter(metrics.GENERATION_TOKENS)
        self._preemptions = values.counter(metrics.PREEMPTIONS)
        self._prefix_queries = values.counter(metrics.PREFIX_QUERIES)
        self._prefix_hits = values.counter(metrics.PREFIX_HITS)
        self._requests = values.counter(metrics.REQUESTS)
        self._step_seconds = values.histogram(metrics.STEP_SECONDS)
        self._step_tokens = values.histogram(metrics.STEP_TOKENS)
        self._queue_seconds = values.histogram(metrics.QUEUE_SECONDS)
        self._first_token_seconds = values.histogram(metrics.FIRST_TOKEN_SECONDS)
        self._prefill_seconds = values.histogram(metrics.PREFILL_SECONDS)
        self._decode_seconds = values.histogram(metrics.DECODE_SECONDS)
        self._request_seconds = values.histogram(metrics.REQUEST_SECONDS)
        self._inter_token_seconds = values.histogram(metrics.INTER_TOKEN_SECONDS)
        self._token_seconds = values.histogram(metrics.TOKEN_SECONDS)
        self._request_prompt_tokens = values.histogram(metrics.REQUEST_PROMPT_TOKENS)
        self._request_generation_tokens = values.histogram(metrics.REQUEST_GENERATION_TOKENS)

    def on_step(self, record: StepRecord) -> None:
        self._prompt_tokens.add(record.num_prefill_tokens)
        self._generation_tokens.add(record.num_output_tokens)
        self._preemptions.add(record.num_preempted)
        self._step_seconds.add(record.seconds)
        self._step_tokens.add(record.num_prefill_tokens + record.num_decode_rows)
        self._inter_token_seconds.add(record.seconds, record.num_decode_rows)

    def on_request_finished(self, record: RequestRecord) -> None:
        arrival, end = record.arrival_time, record.finished_time
        admitted, first = record.first_scheduled_time, record.first_token_time
        self._requests.add(1, record.finish_reason)
        self._request_seconds.add(end - arrival)
        self._request_prompt_tokens.add(record.num_prompt_tokens)
        self._request_generation_tokens.add(record.num_output_tokens)
        if admitted is None:
            return
        self._prefix_queries.add(record.num_prompt_tokens)
        self._prefix_hits.add(record.num_cached_tokens)
        self._queue_seconds.add(admitted - arrival)
        if first is None:
            return
        self._first_token_seconds.add(first - arrival)
        self._prefill_seconds.add(first - admitted)
        self._decode_seconds.add(end - first)
        if record.num_output_tokens > 1:
            self._token_seconds.add((end - first) / (record.num_output_tokens - 1))

    def close(self) -> None:
        """The file stays: what was counted stays counted."""
        self._file.close()
