"""Whether the code that `impl` names is there, told without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanovllm_core.diagnostics.status import missing_code, plugin_statuses, typical_requirements
from nanovllm_core.registry.manager import get_plugin_manager

FILES = {
    "probed/__init__.py": "raise RuntimeError('imported')",
    "probed/backend.py": "class Naive:\n    class Inner: pass\n\nraise RuntimeError('imported')",
    "probed/lazy.py": "def __getattr__(name): return object",
    "probed/all.py": "from probed.backend import *",
}


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that shows if it is imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("probed")
@pytest.mark.parametrize(
    ("impl", "problem"),
    [
        ("probed.backend:Naive", None),
        ("probed.backend:Naive.Inner", None),
        ("probed.backend:Naiv", "probed.backend has no 'Naiv'"),
        ("probed.backends:Naive", "there is no module 'probed.backends'"),
        ("probed.backend.deep:Naive", "there is no module 'probed.backend.deep'"),
        ("prob:Naive", "there is no module 'prob'"),
        ("probed.lazy:Anything", None),
        ("probed.all:Naive", None),
        ("json.decoder:JSONDecoder", None),
        ("json.decoder:JSONDecode", "json.decoder has no 'JSONDecode'"),
        ("json.decoder:JSONDecoder.decod", "json.decoder has no 'JSONDecoder.decod'"),
        ("math:sqrt", None),
    ],
)
def test_code_that_is_not_there_is_told_and_nothing_is_imported(
    impl: str, problem: str | None
) -> None:
    """What only an import could tell is no problem here."""
    found = missing_code(impl)
    said = problem and f"its code {impl!r} cannot be loaded: {problem}"
    assert found == said
    assert not any(name.split(".")[0] == "probed" for name in sys.modules)


def test_a_plugin_whose_code_is_misspelt_is_broken_in_a_listing(install: object) -> None:
    source = """
from nanovllm_core.api import SchedulerSpec, hookimpl

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(name="typo", impl="typo_policy:Polic", contract=1, level="policy")]
"""
    assert callable(install)
    modules = {"typo_plugin": source, "typo_policy": "class Policy: pass"}
    install("typo", {"nanovllm.schedulers": {"typo": "typo_plugin"}}, modules)
    manager = get_plugin_manager()
    found = plugin_statuses(manager, typical_requirements("cpu", None), "scheduler")
    [status] = [status for status in found if status.plugin.name == "typo"]
    assert status.state == "broken"
    assert status.reasons == (
        "its code 'typo_policy:Polic' cannot be loaded: typo_policy has no 'Polic'",
    )
    assert "typo_policy" not in sys.modules
