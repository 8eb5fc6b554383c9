"""`nanovllm_core.api` is all that plugins import, is light, and changes only in sight."""

from __future__ import annotations

import ast
import inspect
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanovllm_core
from nanovllm_core import api

ROOT = Path(__file__).parents[2]
ALLOWED = ("nanovllm_core.api", "nanovllm_core.testing")
PLUGINS = sorted(
    file.parent
    for place in ("plugins", "examples/plugins")
    for file in ROOT.glob(f"{place}/*/pyproject.toml")
)
DRIVE_THE_CORE = {
    # Bounds on waiting are measured on the core's own loop.
    "plugins/scheduler_sjf/tests/test_sjf.py": {"nanovllm_core.engine"},
}
"""Tests of this repository that look further inside than a plugin's author has to."""


def test_the_public_names_and_signatures_are_those_listed() -> None:
    """Where this fails on purpose: `python tests/api/listing.py`, and see whether the change asks
    for another contract version."""
    module = runpy.run_path(str(Path(__file__).parent / "listing.py"))
    assert module["listing"]() == module["FILE"].read_text(encoding="utf-8")


def test_every_public_name_and_method_says_what_it_is() -> None:
    for name in api.__all__:
        value = getattr(api, name)
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


def test_the_names_that_need_torch_are_loaded_when_they_are_used() -> None:
    """Importing every other name leaves torch alone; the first layer brings it."""
    light = [name for name in api.__all__ if name not in api._HOMES]
    code = (
        f"import sys\nfrom nanovllm_core.api import {', '.join(light)}\n"
        "print('torch' in sys.modules)\nfrom nanovllm_core.api import RMSNorm\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True"], result.stderr
    assert set(api._HOMES) <= set(api.__all__) <= set(dir(api))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"nanovllm_core\.api has no attribute 'Layers'"):
        getattr(api, "Layer" + "s")


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
def test_a_plugin_and_its_tests_import_only_api_and_testing(plugin: Path) -> None:
    """import-linter holds it for what is installed; this also for tests, and for type checkers."""
    for file in plugin.rglob("*.py"):
        strange = {name for name in imports_of_the_core(file) if not name.startswith(ALLOWED)}
        name = str(file.relative_to(ROOT))
        assert strange <= DRIVE_THE_CORE.get(name, set()), f"{name}: {sorted(strange)}"
