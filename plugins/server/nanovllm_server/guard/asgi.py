"""What pure ASGI middleware needs: errors in OpenAI's shape, and a watched `send`."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from nanovllm_server.errors import ApiError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They start no work, so they are neither counted, limited nor refused while the server drains."""
STALLED_SECONDS = 1.0
"""So long the last event of a stream waits for a client that reads nothing."""


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to try again, in whole seconds."""
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def encode(error: ApiError) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(error.body)


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a header, by its lower-case name; None where the request has none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def send_error(send: Send, error: ApiError, *, close: bool = False) -> None:
    """Send a whole answer. With `close` the connection ends once the caller ends the body."""
    body = encode(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(error.headers or {}),
    }
    if close:
        headers["connection"] = "close"
    pairs = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": close})


def freeing(send: Send, held: ExitStack) -> Send:
    """A `send` that gives back what a request holds before the last bytes of its answer go out.

    A client that has read all of it may ask another front at once.
    """

    async def free_and_send(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            held.close()
        await send(message)

    return free_and_send


class SentResponse:
    """A `send` that remembers what was sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.status: int | None = None
        self.is_complete = False
        self._is_events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_events = any(
                key.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for key, value in message.get("headers", ())
            )
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True
        await self._send(message)

    async def end_with(self, error: ApiError) -> None:
        """End an answer that is under way: whole, or as the last event of a stream.

        The connection of a client that does not read is cut.
        """
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                if self.status is None:
                    await send_error(self, error)
                elif self._is_events and not self.is_complete:
                    event = b"data: " + encode(error) + b"\n\n"
                    await self({"type": "http.response.body", "body": event})
        except TimeoutError:
            cut(self._scope)


def cut(scope: Scope) -> None:
    """Drop the connection with what it has not sent, where the server offers it."""
    abort: Any = scope.get("state", {}).get("abort_connection")
    if abort is not None:
        abort()
