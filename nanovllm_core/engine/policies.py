"""The scheduling policy that comes with the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm_core.interfaces.scheduler import RequestView, SchedulingPolicy

if TYPE_CHECKING:
    from pydantic import BaseModel


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the latest arrival is preempted first."""

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options

    def service_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival_index,)
