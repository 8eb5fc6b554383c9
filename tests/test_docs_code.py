"""The plugins of docs/write are whole: they install, pass their suite, import what they may."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanovllm_core.kinds import EXTENSION_GROUP, KIND_GROUP, KINDS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/write"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by path."""
    return dict(FILE.findall(page.read_text(encoding="utf-8")))


def write(page: Path, folder: Path) -> Path:
    """Write a page's package, with the empty `__init__.py` that no page wastes a block on."""
    for name, text in files(page).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.parent != folder:
            (file.parent / "__init__.py").touch()
    return folder


def test_every_kind_has_a_page() -> None:
    """By the entry-point group that its package names; two levels of schedulers have one each."""
    groups = [
        group
        for page in PAGES
        for group in tomllib.loads(files(page)["pyproject.toml"])["project"]["entry-points"]
    ]
    assert set(groups) >= {kind.group for kind in KINDS.values()} | {EXTENSION_GROUP, KIND_GROUP}
    assert groups.count("nanovllm.schedulers") == 2


def test_the_plugins_of_all_pages_install_and_pass_their_suites(tmp_path: Path) -> None:
    """As an author would: pip, then pytest on the page's own test file."""
    packages = [write(page, tmp_path / "source" / page.stem) for page in PAGES]
    site, report = tmp_path / "site", tmp_path / "report.xml"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check", "--target", site, *packages),
        ],
        check=True,
    )
    tests = [file for package in packages for file in package.glob("test_*.py")]
    assert len(tests) == len(PAGES)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("--import-mode=importlib", "--rootdir", tmp_path, "--junitxml", report, *tests),
        ],
        env=os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    cases = ElementTree.parse(report).iter("testcase")
    passed = {
        name for case in cases if not len(case) for name in case.get("classname", "").split(".")
    }
    assert passed >= {test.stem for test in tests}, "nothing passed in the others"


@every_page
def test_a_page_s_code_imports_the_api_and_the_kit_and_nothing_else_of_the_core(page: Path) -> None:
    for name, text in files(page).items():
        if name.endswith(".py"):
            modules = {
                node.module
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module
            }
            core = {module for module in modules if module.startswith("nanovllm")}
            assert core <= {"nanovllm_core.api", "nanovllm_core.testing"}, name


@pytest.mark.parametrize(
    "command",
    [
        ("check", "--extend-ignore", "RUF012"),  # the pages leave annotations out, ClassVar too
        ("format", "--check"),
    ],
    ids=lambda command: command[0],
)
def test_the_code_of_all_pages_is_kept_as_ours_is(command: tuple[str, ...], tmp_path: Path) -> None:
    """ruff's rules and format; a page's own package is first-party, nanovllm is not."""
    folders = [write(page, tmp_path / page.stem) for page in PAGES]
    settings = tmp_path / "ruff.toml"
    settings.write_text(
        f'extend = "{ROOT / "pyproject.toml"}"\nsrc = {[str(f) for f in folders]}\n'
    )
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", settings, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
