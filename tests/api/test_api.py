"""The doors are all that plugins import, and change only in sight."""

from __future__ import annotations

import ast
import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanovllm_core

ROOT = Path(__file__).parents[2]
LISTING = runpy.run_path(str(Path(__file__).parent / "listing.py"))
DOORS, names_of = LISTING["DOORS"], LISTING["public_names"]
ALLOWED = (*(door.__name__ for door in DOORS), "nanovllm_kit")
# Triton's functions, which have no signatures to list; importing them needs Triton.
ALLOWED += ("nanovllm_core.kernels.device_functions",)
PLUGINS = sorted(
    file.parent
    for place in ("plugins", "examples/plugins")
    for file in ROOT.glob(f"{place}/*/pyproject.toml")
    # They are tools, and enter a room by its package: importlinter.toml holds it.
    if file.parent.name not in ("bench", "kit", "server")
)
DRIVE_THE_CORE = {
    # Bounds on waiting are measured on the core's own loop.
    "plugins/scheduler_lpt/tests/test_lpt.py": {"nanovllm_core.engine"},
    "plugins/scheduler_sjf/tests/test_sjf.py": {"nanovllm_core.engine"},
}
"""Tests of this repository that look further inside than a plugin's author has to."""


def test_the_public_names_and_signatures_are_those_listed() -> None:
    """Where this fails on purpose: `python tests/api/listing.py`, and see whether the change asks
    for another contract version."""
    assert LISTING["listing"]() == LISTING["FILE"].read_text(encoding="utf-8")


def test_every_public_name_and_method_says_what_it_is() -> None:
    for name, value in [(name, getattr(door, name)) for door in DOORS for name in names_of(door)]:
        if inspect.isclass(value):
            assert value.__doc__, name
            for method, function in vars(value).items():
                if not method.startswith("_") and is_ours(function):
                    assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"
        elif inspect.isfunction(value):
            assert value.__doc__, name


def is_ours(member: object) -> bool:
    """A method or property that the core defines."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return inspect.isfunction(function) and function.__module__.startswith("nanovllm_core")


def test_each_public_name_stands_in_one_door() -> None:
    names = [name for door in DOORS for name in names_of(door)]
    assert len(names) == len(set(names))
    assert {"hookimpl", "RMSNorm", "TorchKernels", "SingleProcessExecutor"} <= set(names)


def imports_of_the_core(file: Path) -> Iterator[str]:
    """The modules of nanovllm_core that a file imports, for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "nanovllm_core":
            # A program's own names, such as LLM; anything else is a module.
            own = set(nanovllm_core.__all__)
            yield from (f"nanovllm_core.{one.name}" for one in node.names if one.name not in own)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovllm_core."):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("nanovllm_core."))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_and_its_tests_import_only_public_doors(plugin: Path) -> None:
    """import-linter holds it for what is installed; this also for tests, and for type checkers."""
    for file in plugin.rglob("*.py"):
        strange = {name for name in imports_of_the_core(file) if name not in ALLOWED}
        name = str(file.relative_to(ROOT))
        assert strange <= DRIVE_THE_CORE.get(name, set()), f"{name}: {sorted(strange)}"
