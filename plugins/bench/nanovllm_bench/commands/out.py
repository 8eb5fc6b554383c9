"""The flag `--out`: a file for the result, tried before the work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def writable(file: Path | None) -> Path | None:
    """A file that can be written, or a usage error before the work whose result it is to hold."""
    if file is None:
        return None
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder; name a file in it")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written; name a file in a folder of yours")
    return file


Out = Annotated[
    Path | None, typer.Option(help="Write the result to this JSON file.", callback=writable)
]
