"""What this distribution brings: two engine clients, the kind `router`, and two routers.

Importing this module imports no torch, and no code of the client or of a router.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import EngineClientSpec, KindSpec, NamedPlugin, hookimpl
from nanovllm_engine_processes.routing import RouterSpec

ROUTER = KindSpec(
    name="router",
    contract=2,
    spec=RouterSpec,
    interface="nanovllm_engine_processes.routing:Router",
    hookspecs="nanovllm_engine_processes.hookspecs",
    conformance="nanovllm_engine_processes.testing:RouterConformance",
    summary="The engine that a request goes to, of several behind one door.",
)


class ProcessesOptions(BaseModel):
    """Options of `engine_client: {name: processes}`: the router, and the bounds of every wait."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    router: NamedPlugin = Field(
        NamedPlugin(name="load"),
        description="The choice among engines: a name, or {name, options}.",
    )
    max_reruns: int = Field(
        2,
        ge=0,
        description="How many ends of engines a request survives; it ends with an error at the "
        "next one. A request that itself ends engines thus ends at most one more than this.",
    )
    start_seconds: float = Field(
        1800, gt=0, description="The longest wait for the start of all engines."
    )
    stall_seconds: float = Field(
        30,
        gt=0,
        description="An engine's process that does not answer for this long is ended.",
    )
    step_seconds: float = Field(
        300,
        gt=0,
        description="An engine that takes longer for one step hangs, and is ended. The longest "
        "step must be shorter: one that compiles kernels, or 16,384 prompt tokens on a CPU. Lower "
        "it for small models on GPUs, and raise it for large ones on a CPU.",
    )
    close_seconds: float = Field(
        10, gt=0, description="The longest wait for engines to close; then they are killed."
    )


class SharedOptions(BaseModel):
    """Options of `engine_client: {name: shared}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(description="The folder of the `EngineShare` whose engine is used.")


class PrefixOptions(BaseModel):
    """Options of the router `prefix`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_size: int = Field(64, ge=1, description="Tokens by which prefixes are compared.")
    max_blocks: int = Field(
        65536, ge=1, description="Blocks that are remembered of each engine, the newest."
    )
    max_excess_requests: int = Field(
        16,
        ge=0,
        description="An engine with this many unfinished requests more than the one with the "
        "fewest still gets requests for their prefix; with more it gets none.",
    )


PROCESSES = EngineClientSpec(
    name="processes",
    impl="nanovllm_engine_processes.client:ProcessClient",
    summary="Engines in processes of their own, which share the requests of one door.",
    options=ProcessesOptions,
    contract=1,
    max_data_parallel_size=1024,
)
SHARED = EngineClientSpec(
    name="shared",
    impl="nanovllm_engine_processes.shared:SharedClient",
    summary="The engine of another process, which shares it with further doors.",
    options=SharedOptions,
    contract=1,
    max_data_parallel_size=1024,
)
LOAD = RouterSpec(
    name="load",
    impl="nanovllm_engine_processes.routers:LoadRouter",
    summary="The engine with the fewest unfinished tokens.",
    contract=1,
)
PREFIX = RouterSpec(
    name="prefix",
    impl="nanovllm_engine_processes.routers:PrefixRouter",
    summary="The engine that was sent the longest prefix, unless it has too much work.",
    options=PrefixOptions,
    contract=1,
)


@hookimpl
def nanovllm_engine_clients() -> Sequence[EngineClientSpec]:
    """Engines in processes, and those of other processes."""
    return [PROCESSES, SHARED]


@hookimpl
def nanovllm_kinds() -> Sequence[KindSpec]:
    """Routers."""
    return [ROUTER]


@hookimpl
def nanovllm_routers() -> Sequence[RouterSpec]:
    """By load, and by prefix."""
    return [LOAD, PREFIX]
