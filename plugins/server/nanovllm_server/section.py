"""What all parts of the server's settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ServerSection(BaseModel):
    """A part of the settings: frozen, no unknown keys, no silent conversions."""

    # The text below a field is its description.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
