"""The settings of the server: the section `serve:` of the configuration, and flags of the command.

The sections of guard and watch are nested models of those packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nanovllm_core.config import explain_options
from nanovllm_core.errors import ConfigError


class ServerSection(BaseModel):
    """A part of the settings: frozen, no unknown keys, no silent conversions."""

    # The text below a field is its description.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


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
    served_model_name: Names = ()
    """The names of the model, one or a list: requests may use any, answers carry the first. Left
    out, `model` as it was given."""


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
            explain_options(error, ServerSettings, "serve", "nanovllm-server")
        ) from None
