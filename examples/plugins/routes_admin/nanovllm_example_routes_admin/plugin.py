"""The spec. nanovllm imports this module to list the plugin; it imports no web framework."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import hookimpl
from nanovllm_server.watch.routes import RouteSpec


class AdminOptions(BaseModel):
    """Options of `serve: {routes: [{name: admin}]}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="The SHA-256 of the administrator's key, in hexadecimal digits. The key comes "
        "in the header X-Admin-Key; take a long random one.",
    )


ADMIN = RouteSpec(
    name="admin",
    impl="nanovllm_example_routes_admin.routes:AdminRoutes",
    summary="POST /admin/reset_prefix_cache, for the holder of a key.",
    options=AdminOptions,
    contract=1,
)


@hookimpl
def nanovllm_routes() -> Sequence[RouteSpec]:
    return [ADMIN]
