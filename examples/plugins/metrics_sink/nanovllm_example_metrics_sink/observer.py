"""The observer that gives windows of steps, and requests, to every configured sink."""

from __future__ import annotations

from contextlib import ExitStack

from nanovllm_core.api import ObserverContext, RequestRecord, StepObserver, StepRecord
from nanovllm_example_metrics_sink.interface import Metrics, MetricsSink
from nanovllm_example_metrics_sink.plugin import KIND, MetricsOptions


class MetricsObserver(StepObserver):
    """Owns the sinks: makes them by name, feeds them, closes them."""

    options: MetricsOptions

    def __init__(self, options: MetricsOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self._window: list[StepRecord] = []
        self._sinks: list[MetricsSink] = []
        self._open = ExitStack()
        plugins = context.plugins
        with ExitStack() as made_so_far:
            for index, choice in enumerate(options.sinks):
                path = f"metrics.sinks.{index}.options"
                resolved = plugins.resolve(KIND.name, choice.name, choice.options, path=path)
                sink: MetricsSink = plugins.make(resolved)
                made_so_far.callback(sink.close)
                self._sinks.append(sink)
            self._open = made_so_far.pop_all()

    def on_step(self, record: StepRecord) -> None:
        self._window.append(record)
        if len(self._window) == self.options.every:
            self._flush()

    def on_request_finished(self, record: RequestRecord) -> None:
        if self.options.requests:
            for sink in self._sinks:
                sink.write_request(record)

    def close(self) -> None:
        """The last window is shorter. Every sink is closed, whatever another one raises."""
        with self._open:
            if self._window:
                self._flush()

    def _flush(self) -> None:
        metrics = summarise(self._window)
        self._window = []
        for sink in self._sinks:
            sink.write(metrics)


def summarise(window: list[StepRecord]) -> Metrics:
    """The metrics of consecutive steps, at least one."""
    last = window[-1]
    return Metrics(
        last_step=last.step,
        steps=len(window),
        seconds=sum(record.seconds for record in window),
        decoded_rows=sum(record.num_decode_rows for record in window),
        prefill_tokens=sum(record.num_prefill_tokens for record in window),
        output_tokens=sum(record.num_output_tokens for record in window),
        finished=sum(record.num_finished for record in window),
        preempted=sum(record.num_preempted for record in window),
        running=last.num_running,
        waiting=last.num_waiting,
        free_blocks=last.num_free_blocks,
        num_blocks=last.num_blocks,
    )
