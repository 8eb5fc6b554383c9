"""The end of an engine: closes everything that holds the device, files or threads."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field

from nanovllm_core.engine.observation import Observation
from nanovllm_core.frontend.gc_freeze import thawed_objects
from nanovllm_core.interfaces.executor import Executor
from nanovllm_core.registry.manager import PluginManager


@dataclass
class EngineParts:
    """The parts that an engine must close; `is_ready` once its start is over."""

    plugins: PluginManager
    executor: Executor
    observation: Observation | None
    is_ready: bool = False
    pid: int = field(default_factory=os.getpid)


def close_parts(parts: EngineParts) -> None:
    """Free the device and close the observers; extensions hear of an engine that had started."""
    if os.getpid() != parts.pid:
        return  # What a fork has copied is not the child's to free.
    with thawed_objects() if parts.is_ready else nullcontext():
        try:
            parts.executor.close()
        finally:
            if parts.observation is not None:
                parts.observation.close()
    if parts.is_ready:
        parts.plugins.hook.nanovllm_engine_closed()
