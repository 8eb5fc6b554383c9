"""Rates and waits, in the log.

Steps wait for `on_step`: it adds up a few numbers, and writes once in many steps.
"""

from __future__ import annotations

import logging

from nanovllm_core.api import ObserverContext, StepObserver, StepRecord

from nanovllm_observer_my_plugin.plugin import MyPluginOptions

logger = logging.getLogger(__name__)


class MyPluginObserver(StepObserver):
    """Adds steps up, and logs the sums."""

    def __init__(self, options: MyPluginOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self._every = options.every
        self._last: StepRecord | None = None
        self._clear()

    def on_step(self, record: StepRecord) -> None:
        """Called once per step, on the engine's thread. Must not raise."""
        self._last = record
        self._steps += 1
        self._seconds += record.seconds
        self._output_tokens += record.num_output_tokens
        self._prompt_tokens += record.num_prefill_tokens
        if self._steps == self._every:
            self._log(record)

    def close(self) -> None:
        """The last call: what was not yet logged is."""
        if self._steps and self._last is not None:
            self._log(self._last)

    def _log(self, record: StepRecord) -> None:
        seconds = self._seconds or float("inf")  # a clock too coarse for these steps
        logger.info(
            "step %d: %.0f tokens/s written, %.0f tokens/s read, %.2f ms per step; %d running, "
            "%d waiting, %d of %d blocks free",
            record.step,
            self._output_tokens / seconds,
            self._prompt_tokens / seconds,
            1000 * self._seconds / self._steps,
            record.num_running,
            record.num_waiting,
            record.num_free_blocks,
            record.num_blocks,
        )
        self._clear()

    def _clear(self) -> None:
        self._steps = self._output_tokens = self._prompt_tokens = 0
        self._seconds = 0.0
