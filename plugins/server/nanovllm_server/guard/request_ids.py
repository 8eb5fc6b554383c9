"""Every request has an id, in its answer and in every log line that is written for it."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_server.guard.asgi import header

REQUEST_ID_HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that this task serves."""


class RequestIds:
    """Middleware: the id is the header X-Request-Id, or a new one if there is none that is sane.

    It is put into `scope["state"]["request_id"]`, `request_id` and the answer's header. An id may
    have 128 letters, digits and `_.:/+=@-`, so it breaks no log line and no header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, REQUEST_ID_HEADER.encode()) or ""
        name = given if _SANE.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        pair = (REQUEST_ID_HEADER.encode(), name.encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), pair]}
            await send(message)

        token = request_id.set(name)
        try:
            await self._app(scope, receive, named)
        finally:
            request_id.reset(token)
