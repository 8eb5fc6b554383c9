"""What the server brings as plugins: observers, and the kind `route`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from nanovllm_core.api import ObserverSpec, hookimpl


class PrometheusOptions(BaseModel):
    """Options of `observers: [{name: prometheus}]`, which `nanovllm serve` adds by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(description="Where the engine's file of counts is made; it must exist.")


PROMETHEUS = ObserverSpec(
    name="prometheus",
    impl="nanovllm_server.watch.observer:PrometheusObserver",
    summary="Counts steps and requests for the server's /metrics.",
    options=PrometheusOptions,
    contract=1,
)


@hookimpl
def nanovllm_observers() -> Sequence[ObserverSpec]:
    return [PROMETHEUS]
