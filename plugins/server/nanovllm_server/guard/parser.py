"""httptools' parser of requests, for a server that speaks no other protocol than HTTP/1.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})
"""The headers that say where the body of a request ends, and whether another request follows."""


class PlainParser:
    """Ignores `Upgrade`: a request that offers another protocol is one of HTTP/1.1, with its body.

    httptools stops behind the headers of such a request, and would take its body for the next
    request. A second parser then reads the body and all that follows. It starts with a head of the
    same framing, whose callbacks do not reach `target`.
    """

    def __init__(self, target: HttpToolsProtocol) -> None:
        self._target = target
        self._parser = self._new()
        self._is_head_known = False

    def feed_data(self, data: bytes) -> None:
        """Parse what has come. Raises httptools.HttpParserError for what is no HTTP."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                self._go_on()
            else:
                return

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn does: bytes after a last request are no error of that request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _go_on(self) -> None:
        """Replace the parser by one that expects the body of the same request.

        CONNECT never comes here: `on_headers_complete` has refused it.
        """
        head = f"POST / HTTP/{self.get_http_version()}\r\n".encode()
        for name, value in self._target.headers:
            if name in FRAMING:
                head += name + b": " + value + b"\r\n"
        self._parser = self._new()
        self._is_head_known = True
        try:
            self._parser.feed_data(head + b"\r\n")
        finally:
            self._is_head_known = False

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        if not self._is_head_known:
            self._target.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_head_known:
            self._target.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_known:
            self._target.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.get_method() == b"CONNECT":
            raise ValueError  # It asks for a tunnel, so no later byte would be HTTP.
        if not self._is_head_known:
            self._target.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._target.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():  # Else the body is still to come.
            self._target.on_message_complete()
