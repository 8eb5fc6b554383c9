"""The built-in sources of checkpoints: folders, and the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel

from nanovllm_core.errors import CheckpointNotFoundError, clip, shown

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
"""The files of a checkpoint: config, tokenizer, chat template, weights; no pickled weights."""
HUB_STRAYS = ("consolidated*.safetensors",)
"""The weights a second time, by names that no model here reads."""


def from_folder(options: BaseModel, reference: str) -> Path:
    """The folder itself; CheckpointNotFoundError if there is none, or it is a file."""
    folder = os.path.expanduser(reference)
    if not os.path.isdir(folder):
        name = shown(reference)
        missing = f"the folder {name} does not exist"
        what = f"{name} is a file" if os.path.isfile(folder) else missing
        raise CheckpointNotFoundError(
            f"model: {what}; give the folder that holds config.json and the safetensors files"
        )
    return Path(folder).resolve()


def from_hub(options: BaseModel, reference: str) -> Path:
    """Download `organisation/name` (or `organisation/name@revision`) once; return the local folder.

    Without a network, or with HF_HUB_OFFLINE=1, what was downloaded before is used.
    """
    # Imported here because it takes a moment, and folders need none of it.
    from huggingface_hub import snapshot_download

    name, _, revision = reference.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_STRAYS),
        )
    except Exception as error:
        raise CheckpointNotFoundError(
            f"model: {shown(reference)} is no folder here and could not be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {clip(str(error), 1000)}); check the name, "
            "the network, and your access to the model"
        ) from error
    return Path(folder)
