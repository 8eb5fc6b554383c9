"""The sink `jsonl`: a line of JSON for each window, and for each request if these are asked for."""

from __future__ import annotations

import json
from dataclasses import asdict

from nanovllm_core.api import ConfigError, RequestRecord
from nanovllm_example_metrics_sink.interface import Metrics, MetricsSink
from nanovllm_example_metrics_sink.plugin import JsonlOptions


class JsonlSink(MetricsSink):
    """Appends to a file, so that several engines and runs may follow each other in it."""

    def __init__(self, options: JsonlOptions) -> None:
        super().__init__(options)
        try:
            # Line by line, so that a reader never sees half a window.
            self._file = options.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"the metrics file {options.path} cannot be opened ({error}); give the sink jsonl "
                "a path in a folder that exists and can be written to"
            ) from error

    def write(self, metrics: Metrics) -> None:
        self._write_line(metrics)

    def write_request(self, request: RequestRecord) -> None:
        self._write_line(request)

    def _write_line(self, record: Metrics | RequestRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        self._file.close()
