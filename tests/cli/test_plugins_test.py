"""`nanovllm plugins test`: the suite of a kind on an installed plugin, a line per check."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError, NanoVLLMError, PluginError, PluginNotFoundError

Install = Callable[..., None]

BROKEN = """
from nanovllm_core.hookspecs import hookimpl
from nanovllm_core.interfaces.attention import AttentionCapabilities, KVLayout
from nanovllm_core.interfaces.specs import AttentionSpec

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="broken", impl="broken_plugin:Backend", contract=1,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), phases=frozenset({"decode"}),
        ),
        kv_layouts=lambda requirements, options: [],
    )]
"""


DECLARED = """
from nanovllm_core.api import KindSpec, PluginSpec, hookimpl

@hookimpl
def nanovllm_kinds():
    return [KindSpec(
        name="cup", contract=1, spec=PluginSpec, hookspecs="cup_hookspecs",
        conformance="cup_tests:CupConformance",
    )]

@hookimpl
def nanovllm_cups():
    return [PluginSpec(name="mug", impl="cup_plugin:Mug", contract=1)]

class Mug:
    def __init__(self, options):
        self.holds = 3
"""
CUP_HOOKSPECS = """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_cups():
    "Cups."
"""
CUP_TESTS = """
from nanovllm_core.testing import SpecConformance

class CupConformance(SpecConformance):
    def test_it_holds_enough(self, plugin):
        assert plugin.load()(plugin.options).holds >= 3
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plugins", "test", *arguments])


def refused(*arguments: str) -> NanoVLLMError:
    error = run(*arguments).exception
    assert isinstance(error, NanoVLLMError), error
    return error


def test_each_check_is_a_line_and_the_verdict_is_the_last() -> None:
    result = run("sdpa", "-k", "reference or tail or behind or layouts")
    assert result.exit_code == 0, result.output
    first, *checks, verdict = result.output.strip().splitlines()
    assert first == "attention sdpa 0.1.0, nanovllm-attention-sdpa: AttentionConformance"
    assert "passed   decode equals the reference" in checks
    assert "skipped  nothing is read behind the last key: declares that it needs finite tails" in (
        checks
    )
    assert len(checks) == 4
    assert all(re.match("(passed |skipped)  ", line) for line in checks)
    passed, skipped = (sum(line.startswith(kind) for line in checks) for kind in ("pas", "ski"))
    counts = f"{passed} passed, 0 failed, {skipped} skipped"
    assert verdict == f"sdpa keeps the contract of attention plugins here: {counts}"


def test_a_plugin_that_breaks_its_contract_fails_with_the_details(install: Install) -> None:
    install(
        "broken", {"nanovllm.attention": {"broken": "broken_plugin"}}, {"broken_plugin": BROKEN}
    )
    result = run("broken", "-k", "layouts or implementation")
    assert result.exit_code == 1
    assert re.search("FAILED   layouts name pages .*: AssertionError: no layout for", result.output)
    assert re.search(
        "FAILED   the implementation can be imported: .*PluginLoadError", result.output
    )
    assert re.search("_ layouts name pages that both phases read _", result.output)
    assert result.output.splitlines()[-1].startswith("broken BREAKS the contract of attention")


def test_a_plugin_of_a_declared_kind_is_tested_by_the_suite_that_the_kind_names(
    install: Install,
) -> None:
    install(
        "nanovllm-cups",
        {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}},
        {"cup_plugin": DECLARED, "cup_hookspecs": CUP_HOOKSPECS, "cup_tests": CUP_TESTS},
    )
    result = run("mug")
    assert result.exit_code == 0, result.output
    first, *checks, verdict = result.output.strip().splitlines()
    assert first == "cup mug 1.2.3, nanovllm-cups: CupConformance"
    assert "passed   it holds enough" in checks
    assert verdict.startswith("mug keeps the contract of cup plugins here: ")


def test_a_plugin_that_cannot_run_here_is_not_said_to_keep_its_contract() -> None:
    result = run("flash", "-k", "devices or device_runs or in_chunks or reference")
    if "runs on cuda, which is not here" not in result.output:
        pytest.skip("flash runs on this machine")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("flash was hardly tested here")


def test_checks_are_chosen_and_a_report_is_written(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    result = run("sdpa", "-k", "layouts", "--junit", str(report), "--option", "kernel=math")
    assert result.output.splitlines()[1:] == [
        "passed   layouts name pages that both phases read",
        "sdpa keeps the contract of attention plugins here: 1 passed, 0 failed, 0 skipped",
    ]
    [case] = ElementTree.parse(report).iter("testcase")
    assert case.get("name") == "test_layouts_name_pages_that_both_phases_read"


def test_what_cannot_be_run_is_refused_by_name(install: Install) -> None:
    error = refused("sdqa")
    assert isinstance(error, PluginNotFoundError)
    assert "did you mean sdpa?" in str(error)
    assert "AttentionConformance has a name with 'xyz'" in str(refused("sdpa", "-k", "xyz"))
    error = refused("sdpa", "--option", "kernal=math")
    assert isinstance(error, ConfigError)
    assert "did you mean kernel?" in str(error)
    assert "'kernel' must be KEY=VALUE" in str(refused("sdpa", "--option", "kernel"))
    install("two", {"nanovllm.schedulers": {"sdpa": "two_plugin"}}, {"two_plugin": ""})
    assert "say which with --kind attention or scheduler" in str(refused("sdpa"))


def test_an_option_that_cannot_be_read_is_refused() -> None:
    assert "--option ageing, line 1, column 2: not valid YAML" in str(
        refused("fcfs", "--option", "ageing=[")
    )
    assert "must be KEY=VALUE" in str(refused("fcfs", "--option", "ageing"))


def test_without_pytest_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    error = refused("sdpa")
    assert isinstance(error, PluginError)
    assert 'pip install "nanovllm-core[testing]"' in str(error)
