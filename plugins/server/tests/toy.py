"""A toy ASGI app behind the guards, and a client that sends what no library would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Answer:
    """What an app sent."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode().lower(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


def scope_of(method: str = "POST", path: str = "/v1/x", **headers: str) -> Scope:
    """The scope of a request; `_` in the names of headers stands for `-`."""
    pairs = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": pairs,
        "client": ("127.0.0.1", 1),
        "state": {},
    }


async def call(app: ASGIApp, scope: Scope, parts: Iterable[bytes | float] = (b"{}",)) -> Answer:
    """Send a body in parts (a number is a pause in seconds), then wait; what came back."""
    answer = Answer()
    left = [*parts]

    async def receive() -> Message:
        while left:
            part = left.pop(0)
            if isinstance(part, bytes):
                return {"type": "http.request", "body": part, "more_body": bool(left)}
            await asyncio.sleep(part)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        answer.messages.append(message)

    await app(scope, receive, send)
    return answer


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body, and with what the guards put into the state."""
    message = await receive()
    state: Mapping[str, Any] = scope["state"]
    key = state.get("key")
    told = {"body": message.get("body", b"").decode("latin-1"), "key": key and key.name}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


LONG = 40_000_000
"""Bytes that fit into no buffer of the system."""


async def long(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with `LONG` bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * LONG})


class Stream:
    """Sends the head of a stream and one event, and the rest when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.started.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
