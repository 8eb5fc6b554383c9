"""The ASGI application: the routes, and what wraps them."""

from __future__ import annotations

from fastapi import FastAPI

from nanovllm_core import AsyncLLM, __version__
from nanovllm_server import chat, completions, models, page, tokens
from nanovllm_server.errors import add_handlers
from nanovllm_server.service import Service
from nanovllm_server.settings import ServerSettings


def make_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The application for a started engine, which stays its caller's to close.

    `app.state.service` is what the routes share.
    """
    service = Service(llm, settings)
    app = FastAPI(title="nanovllm", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    for make_router in ROUTERS:
        app.include_router(make_router(service))
    # Middleware is pure ASGI; the one that is added last is the outermost.
    return app


ROUTERS = (
    completions.make_router,
    chat.make_router,
    models.make_router,
    tokens.make_router,
    page.make_router,
)
"""Each makes a router of a `Service`."""
