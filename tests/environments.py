"""Folders and environments that are made for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from inspect import getsource
from pathlib import Path

import pytest
from filelock import FileLock


def freeze_what_is_imported(folder: Path) -> None:
    """Let a pytest in `folder` collect garbage as this one does, by the same hook."""
    from conftest import pytest_collection_finish

    (folder / "conftest.py").write_text(f"import gc\n\n{getsource(pytest_collection_finish)}")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills: one worker of a run makes it, for all workers."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # each worker has a folder of its own in it
    folder = shared / name
    with FileLock(shared / f"{name}.lock", timeout=600):
        if not folder.exists():
            make(shared / f"{name}-in-the-making")
            (shared / f"{name}-in-the-making").rename(folder)
    return folder


def make_environment(folder: Path) -> Path:
    """A fresh environment that sees this one's libraries, and has none of our distributions.

    The libraries are linked, not copied: torch alone is larger than all else together. Ours are
    left out, their metadata too, by which plugins are found. Returns its Python, which has pip.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, capture_output=True, text=True, check=True, cwd=folder).stdout
    # Hypothesis reads the source of every imported module in a folder of another name.
    libraries = folder / "libraries" / "site-packages"
    libraries.mkdir(parents=True)
    here = [path for path in sys.path if path.endswith("site-packages")]
    for entry in (
        e for path in [*here, sysconfig.get_path("purelib")] for e in Path(path).iterdir()
    ):
        link = libraries / entry.name
        if not link.exists() and not entry.name.startswith(("nanovllm", "_editable_impl_nanovllm")):
            link.symlink_to(entry)
    (Path(site.strip()) / "libraries.pth").write_text(f"{libraries}\n")
    return python
