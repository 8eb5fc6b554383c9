"""Every request ends: by its own deadline, or by the one that a drain sets for all."""

from __future__ import annotations

import asyncio
import math

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, SentResponse, header, send_error

TIMEOUT_HEADER = "x-request-timeout"


class Deadlines:
    """Middleware: cancels a request after `timeout_s`, or sooner where its header asks for it.

    The header `X-Request-Timeout` is in seconds, at most `max_timeout_s`. The client gets 504, or
    an error as the last event of its stream. Cancelling a request aborts it in the engine.
    """

    def __init__(self, app: ASGIApp, timeout_s: float, max_timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._max_timeout_s = max_timeout_s
        self._running: dict[asyncio.Timeout, ApiError] = {}
        """With the answer of each that runs out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        try:
            seconds = self._seconds(header(scope, TIMEOUT_HEADER.encode()))
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        response = SentResponse(scope, send)
        timeout = asyncio.timeout(seconds)
        self._running[timeout] = ApiError(
            504,
            f"the request did not end within {seconds:g} s; ask for fewer tokens, or for more time "
            f"with the header {TIMEOUT_HEADER} (at most {self._max_timeout_s:g})",
            code="deadline_exceeded",
        )
        try:
            async with timeout:
                await self._app(scope, receive, response)
        except TimeoutError:
            if not timeout.expired():
                raise
            await response.end_with(self._running[timeout])
        finally:
            del self._running[timeout]

    def shorten(self, seconds: float, refusal: ApiError) -> None:
        """End every request that is still running in so many seconds with this answer."""
        latest = asyncio.get_running_loop().time() + seconds
        for timeout in self._running:
            when = timeout.when()
            if not timeout.expired() and (when is None or when > latest):
                timeout.reschedule(latest)
                self._running[timeout] = refusal

    def _seconds(self, asked: str | None) -> float:
        if asked is None:
            return self._timeout_s
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= self._max_timeout_s:
            raise ApiError(
                400,
                f"the header {TIMEOUT_HEADER} is {asked[:40]!r}; it must be seconds, above 0 and "
                f"at most {self._max_timeout_s:g}",
                param=TIMEOUT_HEADER,
            )
        return seconds
