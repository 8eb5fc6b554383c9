"""The built-in sources of checkpoints: folders, and the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from nanovllm_core.errors import CheckpointNotFoundError

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
"""What a checkpoint needs: config, tokenizer, chat template and weights; no pickled weights."""
HUB_STRAYS = ("consolidated*.safetensors",)
"""The weights a second time, by names that no model here reads."""


def from_folder(reference: str) -> Path:
    """The folder itself; CheckpointNotFoundError if there is none, or it is a file."""
    folder = Path(reference).expanduser()
    if not reference or not folder.exists():
        raise CheckpointNotFoundError(
            f"model: the folder {reference!r} does not exist; give the folder that holds "
            "config.json and the safetensors files"
        )
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"model: {reference!r} is a file; give the folder that holds it"
        )
    return folder.resolve()


def from_hub(reference: str) -> Path:
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
            f"model: {reference!r} is no folder here and could not be fetched from the Hugging "
            f"Face hub ({type(error).__name__}: {error}); check the name, the network, and your "
            "access to the model"
        ) from error
    return Path(folder)
