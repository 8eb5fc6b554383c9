"""Bodies: their size, the time they may take, the nesting of their JSON, and its parsing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_core.frontend import no_collections
from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, header, send_error
from nanovllm_server.guard.budget import Budget, Share

LINGER_SECONDS = 2.0
"""So long a refused body is still read, so that its sender sees the answer."""


class BodyLimit:
    """Middleware: reads the whole body before the app runs, and refuses what is too much.

    413 beyond `max_bytes`, however the body comes; 408 if it is not there after `timeout_s`; 400
    for JSON that is nested deeper than `max_depth`. A client that goes away gets no answer.
    503 if the bodies of the requests under way would have more than `max_total_bytes`. A body
    counts with what has come, until the request is over: the application keeps it as long.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_total_bytes: int, max_depth: int, timeout_s: float
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = Budget(max_total_bytes)
        self._max_depth = max_depth
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        with Share(self._budget) as share:
            await self._serve(scope, receive, send, share)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        incoming = Incoming(receive)
        try:
            body = await self._read(scope, incoming, share)
        except ApiError as error:
            await _refuse(incoming, send, error)
            return
        if body is None:
            return
        try:
            check_nesting(body, self._max_depth)
        except ApiError as error:
            await send_error(send, error)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, incoming: Incoming, share: Share) -> bytes | None:
        """The body; None if the client has gone."""
        length = header(scope, b"content-length") or ""
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_large(f"has {length[:19]} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await incoming()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large("is larger")
                    share.grow(size)
                    parts.append(part)
                    if incoming.is_over:
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body was not complete after {self._timeout_s:g} s ({size} bytes came); send "
                "it faster, or check its Content-Length",
                code="body_timeout",
            ) from None

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            413,
            f"the body {what}, and the limit is {self._max_bytes} bytes; send less, or raise "
            "serve.limits.max_body_bytes of the server",
            code="body_too_large",
        )


class Incoming:
    """A `receive` that knows whether more of the body follows."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_over = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_over = not message.get("more_body")
        return message


async def _refuse(incoming: Incoming, send: Send, error: ApiError) -> None:
    """Answer while the body still comes, read on for a moment, and end the connection.

    A connection that is closed with bytes unread is reset, and the client may never see the answer.
    """
    await send_error(send, error, close=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while not incoming.is_over:
                await incoming()
    await send({"type": "http.response.body"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one message, and then what the client does."""
    is_taken = False

    async def replay() -> Message:
        nonlocal is_taken
        if is_taken:
            return await receive()
        is_taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def check_nesting(body: bytes, max_depth: int) -> None:
    """Raises ApiError (400) for a body whose JSON is nested deeper than `max_depth`.

    It takes time in proportion to the body. Parsers differ in the depth that they survive, and some
    read UTF-16, so a zero byte, which no JSON in UTF-8 has, is refused as well.
    """
    if b"\0" in body:
        raise ApiError(400, "the body has a zero byte; send JSON in UTF-8")
    if body.count(b"[") + body.count(b"{") > max_depth and nesting(body) > max_depth:
        raise ApiError(
            400,
            f"the body's JSON is nested deeper than {max_depth} levels; send it flatter, or raise "
            "serve.limits.max_json_depth of the server",
            code="json_too_deep",
        )


def nesting(body: bytes) -> int:
    """The deepest nesting of objects and arrays, outside of strings; right for valid JSON."""
    # Backslashes stand only in strings. Without escaped ones and escaped quotes, each quote that
    # is left begins or ends a string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    text_B = np.frombuffer(plain, np.uint8)
    is_outside_B = ~np.logical_xor.accumulate(text_B == ord('"'))
    opens_B = (text_B == ord("[")) | (text_B == ord("{"))
    closes_B = (text_B == ord("]")) | (text_B == ord("}"))
    steps = (opens_B.view(np.int8) - closes_B.view(np.int8))[is_outside_B & (opens_B | closes_B)]
    return int(steps.cumsum(dtype=np.int64).max(initial=0))


class BodyRoute(APIRoute):
    """A route that parses its body without collections of garbage.

    JSON has no cycles, and each collection would look at every list and object of it so far.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_body(request: Request) -> Response:
            return await handle(_BodyRequest(request.scope, request.receive))

        return handle_body


class _BodyRequest(Request):
    async def json(self) -> Any:
        await self.body()  # What follows waits for nothing.
        with no_collections():
            return await super().json()
