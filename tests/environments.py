"""Environments that are made for one test."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def make_environment(folder: Path) -> Path:
    """A fresh environment that sees this one's libraries, and has none of our distributions.

    The libraries are seen, not copied: torch alone is larger than all else together. What is
    installed into it comes first, and what is editable here is not found by a `.pth` file's path.
    Returns its Python, which has pip.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, capture_output=True, text=True, check=True, cwd=folder).stdout
    here = [path for path in sys.path if path.endswith("site-packages")]
    here.append(sysconfig.get_path("purelib"))
    (Path(site.strip()) / "libraries.pth").write_text("\n".join(dict.fromkeys(here)) + "\n")
    return python
