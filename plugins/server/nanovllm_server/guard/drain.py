"""The end of a server on SIGTERM: new requests are refused, running ones finish."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_core.frontend import frozen_objects
from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, retry_after, send_error
from nanovllm_server.guard.deadlines import Deadlines
from nanovllm_server.guard.ledger import REQUESTS, Ledger
from nanovllm_server.guard.tls import tls_times

log = logging.getLogger("nanovllm_server")


Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handled(signals: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Inside, the handler gets these signals. The main thread calls."""
    before = [(one, signal.signal(one, handler)) for one in signals]
    try:
        yield
    finally:
        for one, earlier in before:
            signal.signal(one, earlier)


def end_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that closes, unless the process ignores it (nohup)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """While no server handles `end_signals`, they end the process by way of `finally`, with
    status 0.

    A supervisor that asked for the end sees no failure, as after a drain.
    """
    with handled(end_signals(), lambda *_: sys.exit(0)):
        yield


class Drain:
    """Middleware: counts the requests that run, and refuses new ones with 503 once it drains.

    `drain_s` is what the running ones may still take; the deadlines end those that need longer. The
    fronts of one `ledger` count together.
    """

    def __init__(
        self, app: ASGIApp, deadlines: Deadlines, drain_s: float, ledger: Ledger | None = None
    ) -> None:
        self._app = app
        self._deadlines = deadlines
        self._drain_s = drain_s
        self.is_draining = False
        self._ledger = Ledger.create() if ledger is None else ledger

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return self._ledger.total(REQUESTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        if self.is_draining:
            refusal = ApiError(
                503,
                "the server is shutting down and takes no new requests; send this one to another",
                code="shutting_down",
                headers=retry_after(self._drain_s),
            )
            await send_error(send, refusal, close=True)
            await send({"type": "http.response.body"})
            return
        self._ledger.add(REQUESTS, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._ledger.add(REQUESTS, -1)

    def begin(self, seconds: float | None = None) -> None:
        """Refuse new requests; end the running ones after `seconds`, by default `drain_s`."""
        self.is_draining = True
        seconds = self._drain_s if seconds is None else seconds
        log.info("shutting down: %d requests may run for %g s more", self.running, seconds)
        self._deadlines.shorten(
            seconds,
            ApiError(
                503,
                "the server is shutting down, and the request did not end within the "
                f"{seconds:g} s that it had left; send it again to another",
                code="shutting_down",
            ),
        )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first of `end_signals` or Ctrl-C; its status is 0.

    It listens until the last request has ended, so that load balancers see `/ready` fail. The
    second signal ends the running requests at once. `announce` is called once it listens.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self.announce: Callable[[], None] = lambda: None
        self._drain = drain
        self._num_signals = 0
        self._num_handled = 0

    async def startup(self, sockets: Any = None) -> None:
        connection: Any = self.config.http_protocol_class  # of `uvicorn_options`
        with tls_times(connection.header_seconds, connection.write_seconds):
            await super().startup(sockets)

    async def main_loop(self) -> None:
        """Serve until the end. Collections of garbage skip what the start has made."""
        with frozen_objects():
            self.announce()
            await super().main_loop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        # uvicorn handles SIGINT and SIGTERM.
        with super().capture_signals(), handled(end_signals() if is_main else (), self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called between any two lines, so it only counts. uvicorn's would raise the signal again
        after the shutdown, and the process would end by it."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: what the signals ask for."""
        if self._num_signals > self._num_handled:
            self._drain.begin(0.0 if self._num_handled else None)
            self._num_handled += 1
        if self._num_handled and not self._drain.running:
            self.should_exit = True
        return await super().on_tick(counter)
