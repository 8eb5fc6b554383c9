"""uvicorn's HTTP connection, with limits: it has none on the size and the time of headers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import encode, retry_after, send_error
from nanovllm_server.guard.ledger import CONNECTIONS, Ledger
from nanovllm_server.guard.logs import AccessLog
from nanovllm_server.guard.parser import PlainParser
from nanovllm_server.guard.request_ids import RequestIds

if TYPE_CHECKING:
    from nanovllm_server.guard.settings import LimitSettings

MAX_HEADER_BYTES = 32_768
"""Of one request: its line, its headers, and the trailers of a chunked body."""
HEADER_SECONDS = 10.0
"""From the start of a connection or a request to the end of its headers."""
WRITE_SECONDS = 30.0
"""So long a client may take nothing of an answer that waits for it."""
MAX_CONNECTIONS = 4096
"""Of one server, over all its fronts; requests on further ones are answered with `FULL`."""

MAX_BEYOND = 64
"""Connections beyond the limit that are let send a request before they are refused: a client that
sends a long one may not see an answer that comes before."""
MAX_WAITING = 32
"""Requests of one connection that wait behind the one that is answered. What a client sends at once
is parsed at once, and a quarter of a MiB may hold 14,500 requests."""

FULL = ApiError(
    503,
    "this server has as many connections as it takes; try again later",
    code="server_full",
    headers=retry_after(1),
)

TOO_MANY_WAITING = ApiError(
    429,
    f"{MAX_WAITING} requests of this connection wait for their answers, and no more may; read some "
    "answers before you send more",
    code="too_many_waiting",
)


class Connection(HttpToolsProtocol):
    """431 beyond `MAX_HEADER_BYTES`, 503 beyond `MAX_CONNECTIONS`; unasked, `MAX_BEYOND` later.
    429 beyond `MAX_WAITING`.

    It is closed if the headers of a request are not complete in `HEADER_SECONDS`. So it is if, so
    long after an answer, neither the rest of that request's body nor a further request is there:
    uvicorn's own timer ends at the first byte that comes.
    It is cut if its client takes nothing of a waiting answer for `WRITE_SECONDS`: uvicorn waits for
    it without end, and so does the transport once it is closed.
    Offers `scope["state"]["abort_connection"]`, which drops what is not sent: closing would wait
    for a client that does not read.
    """

    max_header_bytes = MAX_HEADER_BYTES
    header_seconds = HEADER_SECONDS
    write_seconds = WRITE_SECONDS
    max_connections = MAX_CONNECTIONS
    ledger: Ledger
    on_refusal: Callable[[int], None]
    """Called with the status of each answer that the application does not give."""
    _is_too_many = False
    """Since it came: those that were there before are served."""
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    """At the last look; 0 where nothing waited, or all that waited was sent since."""
    _raw_bytes = 0
    """That came while the headers were incomplete: one that never ends reaches no callback."""
    _header_bytes = 0
    """Of whole headers and trailers."""
    _has_headers = False
    _cycles: Sequence[RequestResponseCycle] = ()
    """Requests whose answer is not complete, and perhaps the last one that is."""
    _refusal: ApiError | None = None
    """Follows the answers of the requests before it. Nothing behind it is read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = PlainParser(self)  # type: ignore[assignment]  # it has the methods in use

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_at_writing()
        self.ledger.put(CONNECTIONS, len(self.connections))
        total = self.ledger.total(CONNECTIONS)
        self._is_too_many = total > self.max_connections
        if total > self.max_connections + MAX_BEYOND:
            self._refuse(FULL)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the last one alone, which may wait behind others
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self.ledger.put(CONNECTIONS, len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if not self._has_headers:
            self._raw_bytes += len(data)
        super().data_received(data)
        if not self._has_headers and self._raw_bytes > self.max_header_bytes:
            self.send_400_response("")

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self.transport.abort
        self._header_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + b": " + value + b"\r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_WAITING:
            raise ValueError  # As in `_count`.
        self._has_headers = True
        self._stop_timer()
        if self._is_too_many:
            self.app = RequestIds(AccessLog(self._full))
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.send = partial(_send, cycle, cycle.send)
        self._cycles = [*(one for one in self._cycles if not one.response_complete), cycle]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_headers = False
        self._raw_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._start_timer()
        if self._refusal is not None and all(one.response_complete for one in self._cycles):
            self._refuse(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """Called where the parser, or one of the callbacks above, raised.

        The refusal waits for the answers of earlier requests. A request whose own answer has begun
        before its body ended gets no second one.
        """
        if self.transport.is_closing():
            return
        refusal = ApiError(400, "this is no valid HTTP request")
        if len(self.pipeline) >= MAX_WAITING:
            refusal = TOO_MANY_WAITING
        elif max(self._raw_bytes, self._header_bytes) > self.max_header_bytes:
            refusal = ApiError(
                431, f"the headers have more than {self.max_header_bytes} bytes; send fewer"
            )
        earlier = [one for one in self._cycles if not one.response_complete]
        has_begun = False
        if earlier and earlier[-1].more_body:  # The parser stopped in the body of this request.
            has_begun = earlier.pop().response_started
            if earlier:
                self.pipeline.popleft()
        if earlier:
            self._refusal, self._cycles, self.cycle = refusal, earlier, earlier[-1]
        elif has_begun:
            self.transport.close()
        else:
            self._refuse(refusal)

    async def _full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection too many. uvicorn has one that answers in plain text."""
        self.on_refusal(FULL.status)
        await send_error(send, FULL, close=True)
        await send({"type": "http.response.body"})

    def _refuse(self, refusal: ApiError) -> None:
        """Answer without an application, and close."""
        self.on_refusal(refusal.status)
        body = encode(refusal)
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": str(len(body)),
            **(refusal.headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[refusal.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()

    def _count(self, part: bytes) -> None:
        self._header_bytes += len(part)
        if self._header_bytes > self.max_header_bytes:
            raise ValueError  # The parser stops, and `send_400_response` answers.

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(self.header_seconds, self._headers_are_late)

    def _headers_are_late(self) -> None:
        """Close, unless a request is being answered: an earlier one's answer pauses reading."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._start_timer()

    def _look_at_writing(self) -> None:
        """Cut a client that has taken nothing since the last look; look again otherwise.

        While bytes wait, no further ones are written, so that their number falls if any are taken.
        """
        is_waiting = self.flow.write_paused or self.transport.is_closing()
        unsent = self.transport.get_write_buffer_size() if is_waiting else 0
        if 0 < self._unsent_bytes <= unsent:
            self.transport.abort()
            return
        self._unsent_bytes = unsent
        self._write_timer = self.loop.call_later(self.write_seconds, self._look_at_writing)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _send(cycle: RequestResponseCycle, send: Send, message: Message) -> Awaitable[None]:
    """uvicorn's `send`, which ignores what comes after a disconnect, from its very moment on.

    uvicorn hears of it when the event loop turns again. Until then writing raises.
    """
    if cycle.transport.is_closing() and not cycle.response_complete:
        cycle.disconnected = True
    return send(message)


def connection_class(
    limits: LimitSettings, ledger: Ledger, on_refusal: Callable[[int], None]
) -> type[Connection]:
    """The class of connections with these limits, as uvicorn takes one. `ledger` counts them."""
    fields: dict[str, Any] = {
        "max_header_bytes": limits.max_header_bytes,
        "header_seconds": limits.header_timeout_s,
        "write_seconds": limits.write_timeout_s,
        "max_connections": limits.max_connections,
        "ledger": ledger,
        "on_refusal": staticmethod(on_refusal),
    }
    return type("LimitedConnection", (Connection,), fields)
