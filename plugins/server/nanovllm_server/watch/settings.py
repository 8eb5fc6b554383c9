"""The settings of the server's health, traces, and plugins with routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from nanovllm_server.section import ServerSection


class HealthSettings(ServerSection):
    """When the engine counts as stuck, and what follows its end."""

    ping_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two questions to the engine, whether it lives."""
    stuck_after_s: float = Field(default=10.0, gt=0, validate_default=True)
    """/health answers 503 once the engine has not answered for so many seconds; above `ping_s`."""
    on_engine_death: Literal["exit", "restart"] = "exit"
    """When an error ends the engine: `exit` ends the server with status 1, `restart` starts another
    engine. Running requests get an error in both cases."""
    on_front_death: Literal["restart", "exit"] = "restart"
    """When one of several front processes ends: `restart` starts another one, `exit` ends the
    server with status 1. A fifth end in the same place within a minute does so too. The requests of
    that front are aborted in all cases."""

    @field_validator("stuck_after_s")
    @classmethod
    def _after_a_question(cls, seconds: float, others: ValidationInfo) -> float:
        if seconds <= (ping := others.data.get("ping_s", 0)):
            raise ValueError(
                f"must be above ping_s ({ping:g}), or the engine counts as stuck between two "
                "questions; raise it"
            )
        return seconds


class TracingSettings(ServerSection):
    """Where traces go."""

    endpoint: str | None = None
    """The URL that spans are posted to (OTLP over HTTP), as in `http://localhost:4318/v1/traces`.
    Left out, what OpenTelemetry's environment variables say."""
    service_name: str = "nanovllm"
    """The name of this service in traces."""


class RouteChoice(ServerSection):
    """A plugin of the kind `route` by its name, with the options that its own model checks."""

    name: str = Field(min_length=1)
    """The name of its entry point in the group `nanovllm.routes`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options."""


def _as_choice(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


RouteChoices = Annotated[
    tuple[Annotated[RouteChoice, BeforeValidator(_as_choice)], ...], Field(strict=False)
]
