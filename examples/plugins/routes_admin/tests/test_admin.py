"""The administrator's route, in an application of its own."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from starlette.routing import Router

from nanovllm_core import SamplingParams
from nanovllm_example_routes_admin.plugin import AdminOptions
from nanovllm_example_routes_admin.routes import AdminRoutes
from nanovllm_server.watch.routes import RouteContext
from nanovllm_server.watch.testing import call, demo_engine

KEY = "a long random key"
PATH = "/admin/reset_prefix_cache"


def test_the_key_and_only_the_key_resets_the_prefix_cache() -> None:
    """A prompt that was cached is computed again afterwards; a refusal changes nothing."""
    options = AdminOptions(key_sha256=sha256(KEY.encode()).hexdigest())
    router = Router(AdminRoutes(options, RouteContext(engine=demo_engine, model_name="m")).routes())
    params = SamplingParams(temperature=0, max_tokens=1)

    async def cached() -> int:
        async for output in demo_engine().generate([9] * 40, params):
            found = output.num_cached_tokens
        return found

    async def run() -> None:
        await cached()
        for headers in ({}, {"x-admin-key": "another"}):
            assert (await call(router, PATH, "POST", headers=headers)).status == 403
        assert await cached() > 0
        assert (await call(router, PATH, "POST", headers={"x-admin-key": KEY})).status == 200
        assert await cached() == 0

    asyncio.run(run())
