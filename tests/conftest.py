"""Fixtures that several test files share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution for one test: metadata and modules in a folder on sys.path.

    `install("nanovllm-x", {"nanovllm.attention": {"x": "x_plugin"}}, {"x_plugin": "source"})`.
    """
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def install_distribution(
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str],
        version: str = "1.2.3",
    ) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, entries in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)

    yield install_distribution
    for module in set(sys.modules) - known:
        if (tmp_path / f"{module}.py").exists():
            del sys.modules[module]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate.py, which writes the documents' tables; its own modules lie beside it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs")
    return import_module("generate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test, so that it does not run alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("wheels") is None)
