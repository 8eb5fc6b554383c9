"""How often and how many at once: for each API key, or each address where there are no keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, freeing, retry_after, send_error
from nanovllm_server.guard.keys import ApiKey
from nanovllm_server.guard.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one key or address may use. None is no limit.

    Its bucket holds up to `burst` tokens and gains `rate` a second; a request takes one. All that
    is kept of it is the time at which it is full again.
    """

    rate: float | None
    burst: int
    max_concurrent: int | None

    def take(self, full_at: float, now: float) -> tuple[float, float]:
        """When the bucket is full after a token was taken, and 0.

        Where it has none: as before, and the seconds until there will be one.
        """
        if self.rate is None:
            return full_at, 0.0
        full_at = max(full_at, now)
        tokens = self.burst - (full_at - now) * self.rate
        if tokens < 1:
            return full_at, (1 - tokens) / self.rate
        return full_at + 1 / self.rate, 0.0


class Rates:
    """Middleware: 429 with Retry-After beyond a client's rate or its requests at one time.

    A key's own limits come before these. The fronts of one `ledger` count together. `clock` is in
    seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests_per_minute: float | None = None,
        burst: int = 1,
        max_concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self._app = app
        self._requests_per_minute = requests_per_minute
        self._burst = burst
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._ledger = Ledger.create() if ledger is None else ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        key: ApiKey | None = scope.get("state", {}).get("key")
        allowance = self._allowance(key)
        if allowance.rate is None and allowance.max_concurrent is None:
            await self._app(scope, receive, send)
            return
        address = scope.get("client") or ("",)
        name = f"key {key.name}" if key is not None else f"address {address[0]}"
        with self._ledger.lock():
            # Nobody else gets the row while a request is counted in it.
            row = self._ledger.client(name, self._clock())
            refusal = self._refusal(row, allowance)
            if refusal is None:
                self._ledger.add(row, 1)
        if refusal is not None:
            await send_error(send, refusal)
            return
        with ExitStack() as held:
            held.callback(self._ledger.add, row, -1)
            await self._app(scope, receive, freeing(send, held))

    def _allowance(self, key: ApiKey | None) -> Allowance:
        rate, burst, concurrent = self._requests_per_minute, self._burst, self._max_concurrent
        if key is not None:
            rate = key.requests_per_minute or rate
            burst = key.burst or burst
            concurrent = key.max_concurrent or concurrent
        return Allowance(None if rate is None else rate / 60, burst, concurrent)

    def _refusal(self, row: int, allowance: Allowance) -> ApiError | None:
        running = self._ledger.total(row)
        if allowance.max_concurrent is not None and running >= allowance.max_concurrent:
            return ApiError(
                429,
                f"{running} requests of this client are under way, and its limit is "
                f"{allowance.max_concurrent}; wait for one to end",
                code="too_many_concurrent_requests",
                headers=retry_after(1),
            )
        full_at, wait = allowance.take(self._ledger.full_at(row), self._clock())
        self._ledger.set_full_at(row, full_at)
        if wait:
            return ApiError(
                429,
                f"this client sends requests faster than its limit; wait {wait:.1f} s",
                code="rate_limit_exceeded",
                headers=retry_after(wait),
            )
        return None
