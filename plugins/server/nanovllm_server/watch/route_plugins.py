"""The plugins of the kind `route` that the settings name: makes them and adds their routes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp

from nanovllm_core.api import ConfigError, ResolvedPlugin
from nanovllm_core.errors import shown
from nanovllm_core.registry import get_plugin_manager
from nanovllm_server.watch.routes import RouteContext, RoutePlugin
from nanovllm_server.watch.settings import RouteChoice

KIND = "route"


class RoutePlugins:
    """The plugins with routes of one server, in the order of the settings."""

    def __init__(
        self, choices: Sequence[RouteChoice], context: RouteContext, disable: Sequence[str] = ()
    ) -> None:
        manager = get_plugin_manager(disable)
        self.resolved: list[ResolvedPlugin] = [
            manager.resolve(KIND, one.name, one.options, f"serve.routes.{index}.options")
            for index, one in enumerate(choices)
        ]
        self._plugins: list[RoutePlugin] = [manager.make(one, context) for one in self.resolved]

    def add_routes(self, router: Router) -> None:
        """Add each plugin's routes behind those there; ConfigError for a path that is taken."""
        owners = dict.fromkeys(map(_path, router.routes), "the server")
        for resolved, plugin in zip(self.resolved, self._plugins, strict=True):
            for route in plugin.routes():
                path = _path(route)
                if path in owners:
                    raise ConfigError(
                        f"the route plugin {resolved.name} ({resolved.distribution}) adds the path "
                        f"{shown(path)}, which {owners[path]} has; leave the plugin out of "
                        "serve.routes, or give it another path"
                    )
                owners[path] = f"the route plugin {resolved.name}"
                router.routes.append(route)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The middleware of all plugins around `app`, the first plugin's outermost."""
        for plugin in reversed(self._plugins):
            app = plugin.wrap(app)
        return app

    async def close(self) -> None:
        """Close every plugin, whatever another one raises."""
        async with AsyncExitStack() as closing:
            for plugin in self._plugins:
                closing.push_async_callback(plugin.close)


def _path(route: BaseRoute) -> str:
    return str(getattr(route, "path", ""))
