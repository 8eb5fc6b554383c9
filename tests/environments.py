"""Environments that are made for one test."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


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
