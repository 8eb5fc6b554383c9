"""POST /admin/reset_prefix_cache: forget every cached prefix, as between two measurements."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from nanovllm_example_routes_admin.plugin import AdminOptions
from nanovllm_server.watch.routes import RoutePlugin


class AdminRoutes(RoutePlugin):
    """Its route takes its key besides the API keys that the server asks for."""

    options: AdminOptions

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/admin/reset_prefix_cache", self.reset, methods=["POST"])]

    async def reset(self, request: Request) -> Response:
        """200 once the cache is empty, 403 without the key."""
        key = request.headers.get("x-admin-key", "").encode()
        if not compare_digest(sha256(key).hexdigest(), self.options.key_sha256):
            message = "the header X-Admin-Key does not hold the administrator's key"
            return JSONResponse({"error": {"message": message, "type": "permission_error"}}, 403)
        # The engine does it between two steps: a thread waits, and the event loop goes on.
        await to_thread(self.context.engine().reset_prefix_cache)
        return JSONResponse({"status": "ok"})
