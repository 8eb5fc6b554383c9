"""Checkpoints in zip archives: `model: my_plugin:PATH.zip`."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from nanovllm_core.api import CheckpointNotFoundError, NoOptions


def find(options: NoOptions, reference: str) -> Path:
    """The folder of the checkpoint in an archive, unpacked beside it unless it was before.

    `reference` is what stands behind the name and the colon in `model`. Called once, at start,
    before anything is loaded. Raises CheckpointNotFoundError where there is no such checkpoint.
    """
    archive = Path(reference).expanduser().absolute()
    if not reference or not zipfile.is_zipfile(archive):
        raise CheckpointNotFoundError(
            f"model: {reference!r} is no zip archive; give the path of one, as in "
            "my_plugin:/models/small.zip"
        )
    status = archive.stat()
    # Another archive under the same name is another checkpoint.
    folder = archive.with_name(f"{archive.stem}.{status.st_size}-{status.st_mtime_ns}")
    if not folder.exists():
        _unpack(archive, folder)
    return _checkpoint_in(folder, archive)


def _unpack(archive: Path, folder: Path) -> None:
    """All or nothing: a process that is killed, or another that does the same, leaves no half."""
    scratch = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(scratch)
        os.replace(scratch, folder)
    except OSError as error:
        if not folder.exists():
            raise CheckpointNotFoundError(
                f"model: {archive} cannot be unpacked to {folder}: {error}; make room, or make the "
                "folder writable"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _checkpoint_in(folder: Path, archive: Path) -> Path:
    """Where config.json lies: at the top, or in the one folder that was packed."""
    found = [file.parent for file in (*folder.glob("config.json"), *folder.glob("*/config.json"))]
    if len(found) != 1:
        raise CheckpointNotFoundError(
            f"model: {archive} holds {len(found)} files config.json at the top or one folder down; "
            "pack one checkpoint"
        )
    return found[0]
