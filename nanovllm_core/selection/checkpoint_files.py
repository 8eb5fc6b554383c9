"""Small files of a checkpoint's folder, with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm_core.errors import CheckpointError, CheckpointNotFoundError

CONFIG_NAME = "config.json"
"""A folder that holds this file holds a checkpoint."""


def read_text(path: Path) -> str:
    """The text of a file; CheckpointError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; change its permissions, or fetch it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value


def read_model_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's config.json; CheckpointNotFoundError where it cannot be read or is empty."""
    try:
        config = read_json(checkpoint / CONFIG_NAME)
    except CheckpointError as error:
        raise CheckpointNotFoundError(str(error)) from error
    if not config:
        raise CheckpointNotFoundError(
            f"{checkpoint} holds no {CONFIG_NAME}, or an empty one, so it is no checkpoint; "
            "`model` must name a folder with config.json, a tokenizer and safetensors files"
        )
    return config
