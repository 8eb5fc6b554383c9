"""The settings of the server: the section `serve:` of the configuration, and flags of the command.

The sections of guard and watch are nested models of those packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails

from nanovllm_core.config import explain_options
from nanovllm_core.errors import ConfigError
from nanovllm_server.guard.keys import ApiKey
from nanovllm_server.guard.settings import (
    CorsSettings,
    File,
    LimitSettings,
    LogSettings,
    Seconds,
    Texts,
    TlsSettings,
)
from nanovllm_server.section import ServerSection
from nanovllm_server.watch.settings import HealthSettings, RouteChoices, TracingSettings


def _as_names(value: object) -> object:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1, max_length=256)]
Names = Annotated[tuple[Name, ...], Field(strict=False, max_length=100), BeforeValidator(_as_names)]


class ServerSettings(ServerSection):
    """Where the server listens, and what it calls the model."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on. The default can be reached from this machine alone."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one, which the server prints."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes that speak HTTP, tokenise and make text, the fronts; they share the engine and the
    address. More than one needs Linux, and at least as many cores beside the engine's."""
    served_model_name: Names = ()
    """The names of the model, one or a list: requests may use any, and answers carry the one that
    was used, else the first. Left out, `model` as it was given."""
    keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    """API keys, as `nanovllm serve-key` prints them. The environment variable `SERVE_API_KEY`
    adds one in plain text, of at least 16 printable ASCII characters. Without any key everybody who
    reaches the server may use it."""
    keys_file: File | None = None
    """A YAML file of further keys, in the form of `keys`."""
    allow_anonymous: bool = False
    """Listen beyond this machine without any key."""
    public_paths: Texts = ("/", "/health", "/ready", "/page/")
    """They need no key. One that ends in `/` stands for all beneath it, except `/` itself."""
    isolate_prefix_cache: bool = True
    """Requests share cached prefixes only with those of the same key, so that no tenant learns
    another's prompt from the time of its own."""
    drain_s: Seconds = 30.0
    """On SIGTERM running requests have so many seconds to finish; new ones get 503."""
    limits: LimitSettings = LimitSettings()
    tls: TlsSettings | None = None
    cors: CorsSettings = CorsSettings()
    log: LogSettings = LogSettings()
    health: HealthSettings = HealthSettings()
    """When /health says that the engine is stuck, and what follows the engine's end."""
    routes: RouteChoices = ()
    """Plugins of the kind `route`, in order: each a name, or `{name, options}`. They add routes and
    middleware; the first one's middleware is the outermost."""
    tracing: TracingSettings | None = None
    """Traces by OpenTelemetry (the extra `tracing`); left out, none are made."""

    @field_validator("public_paths")
    @classmethod
    def _begin_at_the_root(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} begins without a slash, so no request has it: /{path}")
        return paths


def parse_settings(section: object, flags: Mapping[str, object] | None = None) -> ServerSettings:
    """The settings of the section `serve:`; flags that are not None win.

    Raises ConfigError, which names path, value and remedy of everything that is wrong.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    values = {} if section is None else section
    try:
        return ServerSettings.model_validate(
            {**values, **given} if isinstance(values, Mapping) else values
        )
    except ValidationError as error:
        raise ConfigError(
            explain_options(_without_secrets(error), ServerSettings, "serve", "nanovllm-server")
        ) from None


SECRET_FIELDS = frozenset({"keys", "keyfile_password"})


def _without_secrets(error: ValidationError) -> ValidationError:
    """The error without values of secret fields: a key may stand where its hash should."""
    return ValidationError.from_exception_data(
        error.title,
        [
            InitErrorDetails(
                type=one["type"],
                loc=one["loc"],
                input="(not shown)" if SECRET_FIELDS.intersection(one["loc"]) else one["input"],
                ctx=one.get("ctx", {}),
            )
            for one in error.errors(include_url=False)
        ],
    )
