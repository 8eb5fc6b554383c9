"""The hook of the kind `router`; nanovllm adds it to its own."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_core.api import hookspec
from nanovllm_engine_processes.routing import RouterSpec


@hookspec
def nanovllm_routers() -> Sequence[RouterSpec]:
    """Choices among engines (group `nanovllm.routers`)."""
