"""The health of the engine: it is asked for its counters, again and again, on a separate thread.

The question goes through the engine's inbox and is answered between two steps. So the age of the
last answer is the age of the last step while requests run, and of the engine's loop otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm_core import AsyncLLM, SamplingParams
from nanovllm_server.watch.settings import HealthSettings

if TYPE_CHECKING:
    from nanovllm_core.engine import EngineStats
    from nanovllm_core.frontend import EngineClient

logger = logging.getLogger(__name__)

PROBE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
KILL_SECONDS = 2.0
"""For engines in processes, whose client has a bound as long and kills them then."""
PROBE_IDS = [0]
"""A prompt of one token: any checkpoint has it, and it fills no block of the prefix cache."""


class EngineMonitor:
    """Asks the engine every `ping_s` seconds whether it lives. Made with a started engine.

    `prepare` is called before an engine takes the place of one that ended, `replace` with that
    engine, and `end` with the error of an engine that none replaces; all on the monitor's thread.
    `sample` gets the counters of each answer.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: HealthSettings,
        *,
        sample: Callable[[EngineStats], None] = lambda stats: None,
        prepare: Callable[[], None] = lambda: None,
        replace: Callable[[AsyncLLM], None] = lambda llm: None,
        end: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._llm = llm
        self._settings = settings
        self._sample = sample
        self._prepare = prepare
        self._replace = replace
        self._end = end
        self._answered = monotonic()
        self._has_failed_to_sample = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanovllm-monitor", daemon=True)
        self.stats: EngineStats | None = None
        """The counters of the last answer."""
        self.failure: BaseException | None = None
        """The error that ended the engine."""
        self.is_warm = False
        """Whether a first request has run."""
        self.is_draining: Callable[[], bool] = lambda: False
        """Whether the server takes no more requests; the server sets it."""

    def start(self) -> None:
        self._answered = monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, unless it waits for an engine that hangs."""
        self._stopping.set()
        self._thread.join(self._settings.ping_s + 1)

    # -- what is known

    @property
    def age(self) -> float:
        """Seconds since the engine last answered."""
        return monotonic() - self._answered

    @property
    def problem(self) -> str | None:
        """The reason why the engine cannot serve; None while it can."""
        if (failure := self.failure) is not None:
            return f"the engine ended with {type(failure).__name__}"
        if (age := self.age) > self._settings.stuck_after_s:
            stats = self.stats
            held = f"; {stats.running} requests ran then, {stats.waiting} waited" if stats else ""
            return (
                f"the engine has not answered for {age:.1f} s, and stuck_after_s is "
                f"{self._settings.stuck_after_s:g}: a step takes longer or hangs, or the engine's "
                f"process is stopped{held}"
            )
        return None

    @property
    def not_ready(self) -> str | None:
        """The reason why new requests belong elsewhere; None where they are welcome."""
        if self.problem:
            return self.problem
        if self.is_draining():
            return "the server is draining: it finishes its requests and takes no more"
        return None if self.is_warm else "the first request has not run yet"

    # -- the thread

    def _run(self) -> None:
        """Warm up, then ask until stopped; an engine that ended is replaced where that is set."""
        with asyncio.Runner() as runner:
            runner.get_loop()  # Now: later there may be no file left to open for one.
            while not self._stopping.is_set():
                try:
                    self._watch(runner)
                except Exception as error:
                    self._died(error)
                if self.failure is not None:
                    return

    def _watch(self, runner: asyncio.Runner) -> None:
        """Ask until stopped. Raises the error of an engine that ended."""
        runner.run(self._probe())
        self.is_warm = True
        while not self._stopping.wait(self._settings.ping_s):
            before, stats = self.stats, self._llm.stats
            self._note(stats)
            if stats.ended or (before is not None and _is_stalled(before, stats)):
                runner.run(self._probe())

    async def _probe(self) -> None:
        """Run a request of one token. An engine that ended refuses it with the error that it had.

        Its answers to `stats` do not show that: it answers, and takes no step. They are noted as
        ever, for the request may have to wait for a row: an engine that is full is no hung one.
        """
        probe = asyncio.create_task(self._generate())
        try:
            while not (probe.done() or self._stopping.is_set()):
                await asyncio.wait((probe,), timeout=self._settings.ping_s)
                self._note(self._llm.stats)
            if probe.done():
                probe.result()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _generate(self) -> None:
        async for _ in self._llm.generate(PROBE_IDS, PROBE):
            pass

    def _note(self, stats: EngineStats) -> None:
        self.stats = stats
        self._answered = monotonic()
        try:
            self._sample(stats)
        except Exception as error:  # The engine is well: its counters cannot be kept.
            if not self._has_failed_to_sample:
                self._has_failed_to_sample = True
                logger.warning(
                    "the metrics of the engine cannot be read (%s: %s); /live lacks what follows, "
                    "and further such errors are not logged",
                    *(type(error).__name__, error),
                )

    def _died(self, error: Exception) -> None:
        """Replace the engine, or report its end. One that ended before its first answer is not."""
        failure = error.__cause__ or error
        logger.error("the engine ended", exc_info=failure)
        self.failure = failure
        if self._settings.on_engine_death == "restart" and self.is_warm:
            self.is_warm = False
            try:
                with suppress(Exception):  # It is broken: what it cannot free, it cannot.
                    self._llm.close()
                self._prepare()
                self._llm = AsyncLLM.from_config(self._llm.config)
                self._replace(self._llm)
            except Exception as restart_error:
                logger.error("a new engine cannot be started", exc_info=restart_error)
            else:
                self._answered = monotonic()
                self.failure = None
                return
        self._end(failure)


def _is_stalled(before: EngineStats, now: EngineStats) -> bool:
    """Requests are unfinished, and between two answers the engine took no step for them."""
    return now.running + now.waiting > 0 and (
        (before.steps, before.output_tokens, before.finished)
        == (now.steps, now.output_tokens, now.finished)
    )


def close_within(llm: AsyncLLM | EngineClient, seconds: float) -> bool:
    """Close an engine, which waits for the step under way; False if it takes longer.

    A client of engines in processes then has a moment more to kill them and to remove its sockets.
    """
    closing = threading.Thread(target=llm.close, name="nanovllm-close", daemon=True)
    closing.start()
    closing.join(seconds)
    if closing.is_alive():
        logger.error("the engine did not close within %g s: a step hangs", seconds)
        closing.join(KILL_SECONDS)
        return False
    return True


class HealthEndpoints:
    """GET /health, for what restarts a server, and GET /ready, for what sends it requests."""

    def __init__(self, monitor: EngineMonitor) -> None:
        self._monitor = monitor

    async def health(self, request: Request) -> Response:
        """200 while the engine answers; 503 and the reason otherwise."""
        return self._answer(self._monitor.problem)

    async def ready(self, request: Request) -> Response:
        """200 once a request has run, until the server drains; 503 and the reason otherwise."""
        return self._answer(self._monitor.not_ready)

    def _answer(self, reason: str | None) -> Response:
        facts = {"last_answer_age_s": round(self._monitor.age, 3)}
        if reason is None:
            return JSONResponse({"status": "ok", **facts})
        return JSONResponse({"status": "unavailable", "reason": reason, **facts}, 503)
