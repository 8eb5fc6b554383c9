"""The times of TLS, which uvicorn leaves at asyncio's: 60 s for a handshake, 30 s for the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tls_times(handshake_s: float, shutdown_s: float) -> Iterator[None]:
    """Inside, servers of TLS that the running loop creates wait no longer for a client.

    uvicorn has no option for the two times, so its call of `create_server` gets them here.
    """
    loop: Any = asyncio.get_running_loop()
    create_server = loop.create_server
    times = {"ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": shutdown_s}

    async def with_times(*arguments: Any, ssl: Any = None, **options: Any) -> Any:
        more = {} if ssl is None else times  # asyncio refuses them for a server without TLS
        return await create_server(*arguments, ssl=ssl, **options, **more)

    loop.create_server = with_times
    try:
        yield
    finally:
        del loop.create_server
