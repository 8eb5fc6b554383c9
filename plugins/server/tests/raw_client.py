"""A server on a thread behind the guards, and clients that write bytes to its socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nanovllm_server.guard.assemble import guarded, uvicorn_options
from nanovllm_server.guard.drain import DrainingServer
from nanovllm_server.settings import ServerSettings

Address = tuple[str, int]
WAIT = 10.0
"""Seconds that no answer may take."""
HEAD = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n"


@contextmanager
def serving(app: ASGIApp, settings: ServerSettings, **options: Any) -> Iterator[DrainingServer]:
    """A server on a thread; whatever its clients did, nothing is left of their connections."""
    inner, drain = guarded(app, settings, [])
    config = uvicorn.Config(
        inner, port=0, log_config=None, lifespan="off", **uvicorn_options(settings, **options)
    )
    server = DrainingServer(config, drain)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield server
    wait_until(lambda: not server.server_state.connections)
    assert drain.running == 0
    server.should_exit = True
    thread.join(WAIT)
    assert not thread.is_alive()


def address_of(server: DrainingServer) -> Address:
    """Where a server listens."""
    host, port = server.servers[0].sockets[0].getsockname()
    return host, port


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=WAIT)


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def exchange(address: Address, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that comes back for these parts, with so many seconds between them."""
    with closing(connect(address)) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(pause)
        return read_all(client)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
