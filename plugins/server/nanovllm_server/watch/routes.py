"""The contract of a plugin with routes, version 1: what authors of the kind `route` import.

Who calls what, and when, once in each front process of a server (`serve.processes`):

    Plugin(options, context)   once the engine has started, before the server listens
    routes()                   once after it; they are added behind the server's own
    wrap(app)                  once: the application that is called in the place of `app`
    close()                    once, on the server's event loop, when it ends

API keys, limits of rates and of bodies stand in front of all plugins: a request that a key has to
come with reaches no plugin without one. Of several plugins the first in the settings is outermost.
This module imports no torch and no web framework, so that a spec's module may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from nanovllm_core.api import PluginSpec

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from nanovllm_core import AsyncLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """The facts of the server that a plugin is made with.

    `engine()` is the engine that serves now. Ask for each request: one that ended may be replaced.
    `model_name` is the name that answers carry.
    """

    engine: Callable[[], AsyncLLM]
    model_name: str


class RoutePlugin:
    """Adds routes, or middleware, or both. All calls but the first come on the event loop."""

    def __init__(self, options: BaseModel, context: RouteContext) -> None:
        self.options = options
        self.context = context

    def routes(self) -> Sequence[BaseRoute]:
        """Routes of Starlette or FastAPI. A path that the server has itself is refused at start."""
        return ()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Pure ASGI middleware around `app`; `app` itself for none.

        What it does not mean to change it passes on as it is, part by part: streams go through it.
        """
        return app

    async def close(self) -> None:
        """The last call: free what is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec(PluginSpec):
    """A plugin with routes. `impl` is a `RoutePlugin` class: `Plugin(options, context)`."""
