"""`GET /v1/models`: the names under which the one model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from nanovllm_server.service import Service


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "nanovllm",
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served names."""
        return {"object": "list", "data": [describe(name) for name in service.names]}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        """One of the served names."""
        return describe(service.check_model(name))

    return router
