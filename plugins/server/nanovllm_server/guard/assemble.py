"""All guards around the application, in their order, and uvicorn with the limits of connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from nanovllm_server.guard.body import BodyLimit
from nanovllm_server.guard.connection import connection_class
from nanovllm_server.guard.deadlines import Deadlines
from nanovllm_server.guard.drain import Drain
from nanovllm_server.guard.hosts import LocalOnly, check_exposure, is_loopback
from nanovllm_server.guard.keys import ApiKey, Keys
from nanovllm_server.guard.ledger import Ledger
from nanovllm_server.guard.logs import AccessLog
from nanovllm_server.guard.rates import Rates
from nanovllm_server.guard.request_ids import RequestIds

if TYPE_CHECKING:
    from nanovllm_server.settings import ServerSettings

EXPOSED_HEADERS = ("x-request-id", "retry-after")
"""That pages of other origins may read."""


def guarded(
    app: ASGIApp,
    settings: ServerSettings,
    keys: Sequence[ApiKey],
    watched: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ledger: Ledger | None = None,
) -> tuple[RequestIds, Drain]:
    """The application behind all guards, and the one that ends it.

    `watched` adds what counts and traces every request, those that are refused too. Without
    `ledger` nobody else counts. Raises ConfigError for a server that everybody on the network could
    use unasked.
    """
    check_exposure(settings.host, bool(keys), settings.allow_anonymous)
    limits, cors = settings.limits, settings.cors
    ledger = ledger or make_ledger(settings)
    app = BodyLimit(
        app,
        limits.max_body_bytes,
        limits.max_total_body_bytes,
        limits.max_json_depth,
        limits.body_timeout_s,
    )
    app = Rates(app, limits.requests_per_minute, limits.burst, limits.max_concurrent, ledger=ledger)
    app = Keys(app, keys, settings.public_paths)
    app = deadlines = Deadlines(app, limits.timeout_s, limits.max_timeout_s)
    if not keys and is_loopback(settings.host):
        app = LocalOnly(app, cors.allow_origins)
    app = drain = Drain(app, deadlines, settings.drain_s, ledger)
    if cors.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors.allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=cors.allow_headers,
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestIds(AccessLog(watched(app))), drain


def make_ledger(settings: ServerSettings, fronts: int = 1) -> Ledger:
    """A new ledger for a server of so many front processes."""
    return Ledger.create(fronts, settings.limits.max_connections)


def uvicorn_options(
    settings: ServerSettings,
    ledger: Ledger | None = None,
    on_refusal: Callable[[int], None] = lambda status: None,
) -> dict[str, Any]:
    """The arguments of `uvicorn.Config` that the guards need.

    `on_refusal` counts, by status, the answers of connections that reach no application.
    """
    return {
        "http": connection_class(settings.limits, ledger or make_ledger(settings), on_refusal),
        # A websocket would go around the guards, which are for HTTP.
        "ws": "none",
        # What the drain has left: streams of GET, and connections of clients that do not read.
        "timeout_graceful_shutdown": 2,
        **(settings.tls.uvicorn_options() if settings.tls is not None else {}),
    }
