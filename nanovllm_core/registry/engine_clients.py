"""The kind `engine_client`, which the core declares as a plugin declares one.

`thread` is the core's own and no plugin: see `nanovllm_core.frontend`.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.interfaces.specs import EngineClientSpec, KindSpec
from nanovllm_core.registry.hookspecs import hookimpl, hookspec


@hookspec
def nanovllm_engine_clients() -> Sequence[EngineClientSpec]:  # type: ignore[empty-body]  # a hook
    """Ways to run engines (group `nanovllm.engine_clients`)."""


ENGINE_CLIENT = KindSpec(
    name="engine_client",
    contract=2,
    spec=EngineClientSpec,
    interface="nanovllm_core.frontend:EngineClient",
    hookspecs="nanovllm_core.registry.engine_clients",
    conformance="nanovllm_kit.engine_client:EngineClientConformance",
    summary="Where engines run, and how a door reaches them.",
)


@hookimpl
def nanovllm_kinds() -> Sequence[KindSpec]:
    """Engine clients."""
    return [ENGINE_CLIENT]
