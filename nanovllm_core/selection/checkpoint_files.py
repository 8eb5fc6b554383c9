"""Small files of a checkpoint's folder, with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm_core.errors import CheckpointError


def read_text(path: Path) -> str:
    """The text of a file; CheckpointError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; change its permissions") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not readable text: {error}; fetch the file again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not readable JSON: {error}; fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value
