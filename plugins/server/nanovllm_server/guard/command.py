"""`nanovllm serve-key`: a new API key, and the entry of the configuration that admits it."""

from __future__ import annotations

from typing import Annotated

import typer

from nanovllm_server.guard.keys import hash_key, make_key


def serve_key(
    name: Annotated[str, typer.Argument(help="Whose key it is, for logs.")] = "key-1",
) -> None:
    """Make an API key for `nanovllm serve`. It is shown once; the server keeps its hash."""
    key = make_key()
    typer.echo(f"# The key, for the client alone: {key}", err=True)
    typer.echo(f'- {{name: {name}, sha256: "{hash_key(key)}"}}')
