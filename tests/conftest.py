"""Order of the tests, and the wheels that several of them install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .environments import made_once

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = [
    ROOT,
    *sorted(
        file.parent
        for pattern in ("plugins/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
        for file in ROOT.glob(pattern)
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that none runs alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every distribution's wheel by its name in the file, the core's first, examples' last."""
    folder = made_once(tmp_path_factory, "dist", lambda into: build_wheels(into, *DISTRIBUTIONS))
    found = {wheel.name.partition("-")[0]: wheel for wheel in sorted(folder.glob("*.whl"))}
    assert len(found) == len(DISTRIBUTIONS)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def build_wheels(folder: Path, *projects: Path) -> None:
    """With the build back end of this environment: nothing is fetched."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "-w", folder, *projects),
        ],
        check=True,
        cwd="/",
    )


def _order(name: str) -> tuple[bool, bool]:
    return name != "nanovllm_core", name.startswith("nanovllm_example_")
