"""The settings of the server's health, metrics and traces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class HealthSettings(BaseModel):
    """When the engine counts as stuck, and what follows its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ping_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds between two questions to the engine."
    )
    stuck_after_s: float = Field(
        default=10.0,
        gt=0,
        description="/health answers 503 once the engine has not answered for so many seconds.",
    )
    on_engine_death: Literal["exit", "restart"] = Field(
        default="exit",
        description="When an error ends the engine: end the server with status 1, or start "
        "another engine. Running requests get an error in both cases.",
    )


class RouteChoice(BaseModel):
    """A plugin of the kind `route` by its name, with the options that its own model checks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
