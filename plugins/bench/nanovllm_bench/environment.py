"""Where a measurement was made: versions, device, commit and whether the tree was clean."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "nanovllm-core",
    "nanovllm-attention-triton",
    "nanovllm-attention-sdpa",
    "nanovllm-attention-flash",
    "torch",
    "triton",
    "transformers",
    "flash-attn-4",
)


def describe_environment() -> dict[str, Any]:
    """Versions, device and commit, as they stand in every result file.

    The device is the current GPU, which an engine makes its own, and the processor without one.
    """
    import torch

    device: dict[str, Any] = {"name": _processor()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return {
        "python": sys.version.split()[0],
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "device": device,
        **describe_commit(Path(__file__)),
    }


def describe_commit(file: Path) -> dict[str, Any]:
    """The commit of the checkout that holds `file`, and whether its tree is clean; else None.

    A package installed below another project's checkout is not that project's.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return {"commit": None, "clean_tree": None}
    commit = _git(file.parent, "rev-parse", "HEAD")
    status = _git(file.parent, "status", "--porcelain")
    return {"commit": commit, "clean_tree": None if status is None else status == ""}


def _processor() -> str:
    """The processor's model where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.processor() or platform.machine())


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
