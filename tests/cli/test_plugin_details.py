"""`nanovllm plugins show` and `schema`: all that one plugin says about itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import (
    ConfigError,
    NanoVLLMError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
)

Install = Callable[..., None]

SCHEDULERS = """
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from nanovllm_core.api import SchedulerSpec, hookimpl

class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    deep: int = 1

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pace: Literal["slow", "fast"] = Field(default="slow", description="How it goes.")
    limit: int | None = Field(default=None, description="Where it ends.")
    weights: list[float] = []
    inner: Inner = Inner()
    needed: str

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(
        name="fair", impl="fair_code:Fair", contract=1, summary="Everybody in turn.",
        options=Options, level="scheduler",
    )]
"""

KIND = """
from dataclasses import dataclass
from pathlib import Path
from nanovllm_core.api import KindSpec, PluginSpec, hookimpl

@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec(PluginSpec):
    unit: str = "s"
    folder: Path = Path("here")

@hookimpl
def nanovllm_kinds():
    return [KindSpec(
        name="sink", contract=2, current_contract=3, spec=SinkSpec, hookspecs="sink_hooks",
        conformance="sink_tests:Suite", summary="Places for numbers.",
    )]
"""

HOOKS = """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_sinks():
    "Places for numbers."
"""

EXTENSION = """
from nanovllm_core.api import hookimpl

@hookimpl
def nanovllm_engine_closed():
    pass
"""


@pytest.fixture
def fair(install: Install) -> None:
    """A whole scheduler with options of several types."""
    install("fair-scheduler", {"nanovllm.schedulers": {"fair": "fair_spec"}}, {
        "fair_spec": SCHEDULERS, "fair_code": "raise SystemExit('its code was run')",
    })  # fmt: skip


def run(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["plugins", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def error(*arguments: str) -> NanoVLLMError:
    raised = CliRunner().invoke(make_app(), ["plugins", *arguments]).exception
    assert isinstance(raised, NanoVLLMError)
    return raised


def test_show_says_what_a_plugin_is_without_running_its_code(fair: None) -> None:
    shown = run("show", "fair").splitlines()
    for line in (
        "kind: scheduler",
        "distribution: fair-scheduler 1.2.3",
        "implementation: fair_code:Fair",
        "contract: 1",
        "current contract: 1",
        "level: scheduler",
        "summary: Everybody in turn.",
    ):
        assert line in shown
    assert any(line.startswith("defined in: fair_spec (/") for line in shown)


def test_show_names_options_with_type_default_and_meaning(fair: None) -> None:
    shown = run("show", "fair").splitlines()
    at = shown.index("  pace: slow | fast = slow")
    assert shown[at + 1].strip() == "How it goes."
    assert "  limit: integer or null = None" in shown
    assert "  weights: list of number = []" in shown
    assert "  needed: string = required" in shown
    assert any(line.startswith("  inner: object") for line in shown)


def test_show_tells_the_capabilities_of_a_backend_and_whether_it_runs_here() -> None:
    pytest.importorskip("nanovllm_attention_sdpa", reason="needs the sdpa plugin")
    details = json.loads(run("show", "sdpa", "--json"))
    assert details["runs here"] == "ready"
    assert details["capabilities"]["devices"] == ["cpu", "cuda"]
    shown = run("show", "sdpa")
    assert "  devices: cpu, cuda" in shown.splitlines()
    assert "  head sizes: any" in shown.splitlines()


def test_show_says_why_a_backend_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nanovllm_attention_flash", reason="needs the flash plugin")
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "runs here: does not run on cpu, only on cuda" in run("show", "flash")


def test_show_tells_what_a_declared_kind_is(install: Install) -> None:
    install("nanovllm-sinks", {"nanovllm.kinds": {"sink": "sink_kind"}}, {
        "sink_kind": KIND, "sink_hooks": HOOKS,
    })  # fmt: skip
    details = json.loads(run("show", "sink", "--json"))
    assert details["entry-point group"] == "nanovllm.sinks"
    assert details["current contract"] == 3
    assert details["conformance"] == "sink_tests:Suite"
    assert details["plugins"] == []


def test_a_field_of_a_declared_kinds_spec_is_shown_whatever_its_type(install: Install) -> None:
    plugin = """
from sink_kind import SinkSpec
from nanovllm_core.api import hookimpl

@hookimpl
def nanovllm_sinks():
    return [SinkSpec(name="lines", impl="x:X", contract=3)]
"""
    groups = {"nanovllm.kinds": {"sink": "sink_kind"}, "nanovllm.sinks": {"lines": "sink_lines"}}
    install("nanovllm-sinks", groups, {
        "sink_kind": KIND, "sink_hooks": HOOKS, "sink_lines": plugin,
    })  # fmt: skip
    details = json.loads(run("show", "lines", "--json"))
    assert (details["unit"], details["folder"]) == ("s", "here")


def test_show_names_the_hooks_of_an_extension(install: Install) -> None:
    install("diary", {"nanovllm.extensions": {"diary": "diary_show"}}, {"diary_show": EXTENSION})
    assert json.loads(run("show", "diary", "--json"))["hooks"] == ["nanovllm_engine_closed"]


def test_a_name_of_two_kinds_needs_the_kind(fair: None, install: Install) -> None:
    install("fair-extension", {"nanovllm.extensions": {"fair": "fair_diary"}}, {
        "fair_diary": EXTENSION
    })  # fmt: skip
    raised = error("show", "fair")
    assert isinstance(raised, PluginConflictError)
    assert "several plugins; say which with --kind extension or scheduler" in str(raised)
    assert "level: scheduler" in run("show", "fair", "--kind", "scheduler")


def test_a_name_that_nobody_has_is_told_with_the_nearest(fair: None) -> None:
    raised = error("show", "fari")
    assert isinstance(raised, PluginNotFoundError)
    assert "did you mean fair?" in str(raised)
    assert isinstance(error("show", "fair", "--kind", "model"), PluginNotFoundError)


def test_a_disabled_plugin_is_told_to_be_disabled(
    fair: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", "['scheduler:fair']")
    raised = error("show", "fair")
    assert isinstance(raised, PluginNotFoundError)
    assert "is disabled; take it out of plugins.disable" in str(raised)


def test_a_broken_plugin_is_an_error_that_names_it(install: Install) -> None:
    install("broken", {"nanovllm.schedulers": {"broken": "broken_show"}}, {"broken_show": "1/0"})
    raised = error("show", "broken")
    assert isinstance(raised, PluginLoadError)
    assert "ZeroDivisionError" in str(raised)


def test_schema_is_that_of_the_options(fair: None) -> None:
    schema = json.loads(run("schema", "fair"))
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["needed"]
    assert schema["properties"]["pace"]["enum"] == ["slow", "fast"]


def test_an_extension_has_no_schema(install: Install) -> None:
    install("diary", {"nanovllm.extensions": {"diary": "diary_schema"}}, {
        "diary_schema": EXTENSION
    })  # fmt: skip
    raised = error("schema", "diary")
    assert isinstance(raised, ConfigError)
    assert "states no options" in str(raised)
