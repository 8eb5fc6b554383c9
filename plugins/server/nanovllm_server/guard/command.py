"""`nanovllm serve-key`: a new API key, and the entry of the configuration that admits it."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from nanovllm_core.errors import ConfigError, shown
from nanovllm_server.guard.keys import ApiKey, hash_key, make_key


def serve_key(
    name: Annotated[str, typer.Argument(help="Whose key it is, for logs.")] = "key-1",
) -> None:
    """Make an API key for `nanovllm serve`. It is shown once; the server keeps its hash."""
    key = make_key()
    try:
        ApiKey(name=name, sha256=hash_key(key))
    except ValidationError:
        raise ConfigError(
            f"the name {shown(name)} cannot be used; take 1 to 64 letters, digits and `_.-`"
        ) from None
    typer.echo(f"# The key, for the client alone: {key}", err=True)
    typer.echo(f'- {{name: "{name}", sha256: "{hash_key(key)}"}}')
