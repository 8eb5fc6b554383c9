"""How often and how many at once: for each API key, or each address where there are no keys."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, retry_after, send_error
from nanovllm_server.guard.keys import ApiKey

MAX_CLIENTS = 10_000
"""Clients that are remembered; beyond it those that have used nothing lately are forgotten."""


class TokenBucket:
    """Holds up to `burst` tokens and gains `rate` a second; a request takes one."""

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._time = now

    def take(self, now: float) -> float:
        """Take a token; 0, or the seconds until there will be one."""
        self._refill(now)
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._tokens == self._burst

    def _refill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now - self._time) * self._rate)
        self._time = now


class Client:
    """What one key or address has used."""

    def __init__(self, bucket: TokenBucket | None, max_concurrent: int | None) -> None:
        self.bucket = bucket
        self.max_concurrent = max_concurrent
        self.running = 0

    def is_idle(self, now: float) -> bool:
        return not self.running and (self.bucket is None or self.bucket.is_full(now))


class Rates:
    """Middleware: 429 with Retry-After beyond a client's rate or its requests at one time.

    None is no limit. A key's own limits come before these. `clock` is in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests_per_minute: float | None = None,
        burst: int = 1,
        max_concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._requests_per_minute = requests_per_minute
        self._burst = burst
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._clients: dict[str, Client] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        client = self._client(scope)
        refusal = self._refusal(client)
        if refusal is not None:
            await send_error(send, refusal)
            return
        client.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            client.running -= 1

    def _client(self, scope: Scope) -> Client:
        key: ApiKey | None = scope.get("state", {}).get("key")
        address = scope.get("client") or ("",)
        name = f"key {key.name}" if key is not None else f"address {address[0]}"
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                now = self._clock()
                self._clients = {n: c for n, c in self._clients.items() if not c.is_idle(now)}
            client = self._clients[name] = self._new_client(key)
        return client

    def _new_client(self, key: ApiKey | None) -> Client:
        rate, burst, concurrent = self._requests_per_minute, self._burst, self._max_concurrent
        if key is not None:
            rate = key.requests_per_minute or rate
            burst = key.burst or burst
            concurrent = key.max_concurrent or concurrent
        bucket = None if rate is None else TokenBucket(rate / 60, burst, self._clock())
        return Client(bucket, concurrent)

    def _refusal(self, client: Client) -> ApiError | None:
        if client.max_concurrent is not None and client.running >= client.max_concurrent:
            return ApiError(
                429,
                f"{client.running} requests of this client are under way, and its limit is "
                f"{client.max_concurrent}; wait for one to end",
                code="too_many_concurrent_requests",
                headers=retry_after(1),
            )
        wait = client.bucket.take(self._clock()) if client.bucket is not None else 0.0
        if wait:
            return ApiError(
                429,
                f"this client sends requests faster than its limit; wait {wait:.1f} s",
                code="rate_limit_exceeded",
                headers=retry_after(wait),
            )
        return None
