"""The hook of the kind `route`; nanovllm adds it to its own."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import hookspec
from nanovllm_server.watch.routes import RouteSpec


@hookspec
def nanovllm_routes() -> Sequence[RouteSpec]:
    """Plugins with routes or middleware of the server (group `nanovllm.routes`)."""
