"""A line of JSON per step."""

from __future__ import annotations

import json
from dataclasses import asdict

from nanovllm_core.api import ConfigError, StepRecord

from nanovllm_kind_my_plugin.plugin import JsonlOptions
from nanovllm_kind_my_plugin.spec import StepSink


class JsonLines(StepSink):
    """Appends to a file; the operating system buffers what is written."""

    def __init__(self, options: JsonlOptions) -> None:
        super().__init__(options)
        try:
            self._file = open(options.path, "a", encoding="utf-8")  # noqa: SIM115 - see close
        except OSError as error:
            raise ConfigError(
                f"jsonl: {options.path!r} cannot be written: {error}; give the path of a file in "
                "a folder that exists"
            ) from error

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        self._file.close()
