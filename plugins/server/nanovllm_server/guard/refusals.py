"""Answers of the guards: an error in OpenAI's shape, and how it is sent."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from nanovllm_core.api import NanoVLLMError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They start no work, so they are neither counted, limited nor refused while the server drains."""
LINGER_SECONDS = 2.0
"""So long a body that is too large is still read, so that its sender sees the answer."""
STALLED_SECONDS = 1.0
"""So long the last event of a stream waits for a client that reads nothing."""


class Refusal(NanoVLLMError):
    """A request is not served: the HTTP status, and OpenAI's `type`, `param` and `code`.

    `retry_after` is in seconds. It becomes the header Retry-After, rounded up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The error as OpenAI's API writes it."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Those that the status calls for."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a header, by its lower-case name; None where the request has none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def send_refusal(
    send: Send, refusal: Refusal, more: Mapping[str, str] | None = None, *, close: bool = False
) -> None:
    """Send a whole answer. `close` ends the connection after it."""
    body = refusal.body
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **refusal.headers,
        **(more or {}),
    }
    if close:
        headers["connection"] = "close"
    pairs = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": close})


async def refuse_body(receive: Receive, send: Send, refusal: Refusal) -> None:
    """Answer while the body still comes, read on for a moment, and end the connection.

    A connection that is closed with bytes unread is reset, and the client may never see the answer.
    """
    await send_refusal(send, refusal, close=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body"})


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

    async def end_with(self, refusal: Refusal) -> None:
        """End an answer that is under way: whole, or as the last event of a stream.

        The connection of a client that does not read is cut.
        """
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                if self.status is None:
                    await send_refusal(self, refusal)
                elif self._is_events and not self.is_complete:
                    event = b"data: " + refusal.body + b"\n\n"
                    await self({"type": "http.response.body", "body": event})
        except TimeoutError:
            cut(self._scope)


def cut(scope: Scope) -> None:
    """Drop the connection with what it has not sent, where the server offers it."""
    abort: Any = scope.get("state", {}).get("abort_connection")
    if abort is not None:
        abort()
