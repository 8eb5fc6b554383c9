"""The ASGI application: the routes, and what wraps them."""

from __future__ import annotations

from fastapi import FastAPI

from nanovllm_core import AsyncLLM, __version__
from nanovllm_server import chat, completions, models, page, tokens
from nanovllm_server.errors import add_handlers
from nanovllm_server.fronts.facts import FrontFacts
from nanovllm_server.guard.assemble import make_ledger
from nanovllm_server.service import Service
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.watch import Watch


def make_app(llm: AsyncLLM, settings: ServerSettings, front: FrontFacts | None = None) -> FastAPI:
    """The application for a started engine, which stays its caller's to close.

    `front` is what it has in common with those of other processes, if it is one of several.
    `app.state.service` is what the routes share, `app.state.watch` what watches the engine.
    """
    front = front or FrontFacts(make_ledger(settings))
    service = Service(llm, settings, front.ledger)
    watch = Watch(service, front)
    app = FastAPI(
        title="nanovllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # A redirect would lead to the host that the request names, over http.
        redirect_slashes=False,
        lifespan=watch.lifespan,
        # FastAPI's own, on where the process has a provider of OpenTelemetry: it exports queries
        # and the texts of exceptions, and wraps each part of a stream. `watch` has ours.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service, app.state.watch = service, watch
    add_handlers(app)
    for make_router in ROUTERS:
        # Not `include_router`, which keeps a router whole: every path must be known.
        app.router.routes.extend(make_router(service).routes)
    app.router.routes.extend(watch.routes())
    watch.add_plugin_routes(app.router)
    # Middleware is pure ASGI; the one that is added last is the outermost.
    app.add_middleware(watch.wrap_plugins)
    return app


ROUTERS = (
    completions.make_router,
    chat.make_router,
    models.make_router,
    tokens.make_router,
    page.make_router,
)
"""Each makes a router of a `Service`."""
