"""The base of the conformance suites: fixtures, strict expected failures, checks of every spec."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import nanovllm_kit
from nanovllm_core.errors import ConfigError, PluginLoadError, PluginNotFoundError
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_kit import (
    Conformance,
    PluginUnderTest,
    SpecConformance,
    installed_plugin,
    plugin_under_test,
)

pytest_plugins = ["pytester"]

SUITE = """
from typing import ClassVar
import pytest
from nanovllm_kit import Conformance, PluginUnderTest, installed_plugin

class TwoChecks(Conformance):
    def test_right(self, plugin):
        pass

    def test_wrong(self, plugin):
        raise AssertionError("wrong")

    def test_skipped(self, plugin):
        pytest.skip("not declared")

    @pytest.mark.parametrize("size", [1, 2])
    def test_sizes(self, plugin, size):
        assert size == 1

class TestIt(TwoChecks):
    expected_failures: ClassVar = {failures}

    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return installed_plugin("scheduler", "fcfs")
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest within this one imports its plugins anew, which takes seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def outcomes(pytester: pytest.Pytester, **failures: str) -> dict[str, int]:
    pytester.makepyfile(SUITE.replace("{failures}", repr(failures)))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()


def test_a_check_that_fails_fails_the_suite(pytester: pytest.Pytester) -> None:
    assert outcomes(pytester) == {"failed": 2, "passed": 2, "skipped": 1}


def test_an_expected_failure_is_no_failure(pytester: pytest.Pytester) -> None:
    """Of a check, or of one set of its parameters: the others must pass as before."""
    assert outcomes(pytester, **{"test_wrong": "a known gap", "test_sizes[2]": "too large"}) == {
        "xfailed": 2,
        "passed": 2,
        "skipped": 1,
    }


def test_an_expected_failure_that_passes_fails(pytester: pytest.Pytester) -> None:
    wrong = {"test_wrong": "a known gap", "test_sizes[2]": "too large"}
    mended = {"test_right": "mended", "test_sizes[1]": "mended"}
    assert outcomes(pytester, **wrong, **mended) == {"failed": 2, "xfailed": 2, "skipped": 1}


def test_a_skip_stays_a_skip_where_a_failure_was_expected(pytester: pytest.Pytester) -> None:
    """A check that does not apply here says nothing about the failure elsewhere."""
    failures = {"test_skipped": "fails on a GPU", "test_wrong": "a known gap", "test_sizes[2]": "x"}
    assert outcomes(pytester, **failures) == {"xfailed": 2, "passed": 2, "skipped": 1}


def test_an_expected_failure_of_an_unknown_check_is_refused() -> None:
    for parameters in ("", "[1-2]"):
        failures = {f"test_the_options_model_forbids{parameters}": "x"}
        with pytest.raises(
            TypeError, match=r"check 'test_the_options_model_forbids'; did you mean"
        ):
            type("T", (SpecConformance,), {"expected_failures": failures})


def test_an_expected_failure_needs_a_reason() -> None:
    failures = {"test_the_implementation_can_be_imported": " "}
    with pytest.raises(TypeError, match="test_the_implementation_can_be_imported needs a reason"):
        type("T", (SpecConformance,), {"expected_failures": failures})


def test_a_suite_without_its_fixture_says_which(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from nanovllm_kit import SpecConformance\nclass TestIt(SpecConformance): pass"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*TestIt needs a fixture: *def plugin(self)*"])


def test_an_installed_plugin_is_found_with_its_light_module() -> None:
    plugin = installed_plugin("scheduler", "fcfs")
    assert plugin.spec.name == "fcfs"
    assert plugin.spec_module == "nanovllm_core.registry.builtins"
    assert plugin.load().__name__ == "FcfsPolicy"
    with pytest.raises(PluginNotFoundError, match="fcfx"):
        installed_plugin("scheduler", "fcfx")


def test_a_spec_alone_is_enough() -> None:
    """The module that returns it is found among those that are imported."""
    spec = installed_plugin("scheduler", "fcfs").spec
    assert plugin_under_test(spec).spec_module == "nanovllm_core.registry.builtins"


TWIN = """
from nanovllm_core.api import SchedulerSpec, hookimpl

SPEC = SchedulerSpec(name="twin", impl="own_twin.policy:Twin", contract=1)

@hookimpl
def nanovllm_schedulers():
    asked.append(__name__)
    return [SPEC]
"""


def test_the_package_of_the_implementation_is_searched_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a check does not wait for a look at torch, and no other module's hook is called."""
    asked: list[str] = []
    for name in ("another_twin", "own_twin", "own_twin.plugin", "own_twin.more"):
        module = ModuleType(name)
        vars(module)["asked"] = asked
        if name != "own_twin":
            exec(TWIN, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    spec = vars(sys.modules["another_twin"])["SPEC"]
    assert plugin_under_test(spec).spec_module == "own_twin.plugin"
    assert asked == ["own_twin.plugin"]
    for name in ("own_twin.plugin", "own_twin.more"):
        monkeypatch.delitem(sys.modules, name)
    assert plugin_under_test(spec).spec_module == "another_twin"


def test_a_spec_that_no_hook_returns_is_refused() -> None:
    with pytest.raises(PluginLoadError, match="'lost'"):
        plugin_under_test(SchedulerSpec(name="lost", impl="lost:Lost", contract=1))


def test_wrong_options_are_refused_by_name() -> None:
    spec = installed_plugin("scheduler", "fcfs").spec
    with pytest.raises(ConfigError, match=r"options\.speed: unknown option.*fcfs"):
        plugin_under_test(spec, speed=3)


def checked(spec: SchedulerSpec, module: str) -> SpecConformance:
    plugin = PluginUnderTest(spec, NoOptions(), module)
    suite = SpecConformance()
    suite.test_reading_the_spec_imports_nothing_heavy(plugin)
    return suite


def test_a_spec_module_that_imports_torch_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "light_spec.py").write_text("import json\n")
    (tmp_path / "heavy_spec.py").write_text("import torch\n")
    (tmp_path / "broken_spec.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = SchedulerSpec(name="x", impl="x:X", contract=1)
    checked(spec, "light_spec")
    with pytest.raises(AssertionError, match="heavy_spec imports torch"):
        checked(spec, "heavy_spec")
    with pytest.raises(AssertionError, match="no_such_module"):
        checked(spec, "broken_spec")


def test_options_that_allow_typos_are_caught() -> None:
    class Loose(NoOptions):
        model_config = NoOptions.model_config | {"extra": "ignore"}

    plugin = PluginUnderTest(
        SchedulerSpec(name="x", impl="x:X", contract=1, options=Loose), Loose(), "x"
    )
    with pytest.raises(AssertionError, match="Loose must set"):
        SpecConformance().test_the_options_model_forbids_unknown_keys(plugin)


def test_the_package_imports_no_pytest_until_a_suite_is_used() -> None:
    """So that `nanovllm plugins new --help` is quick."""
    code = (
        "import sys, nanovllm_kit as t\nprint('pytest' in sys.modules)\n"
        "t.Conformance\nprint('pytest' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    """Each is written once, in an import for type checkers; `__all__` and `dir` follow from it."""
    assert {"AttentionConformance", "plugin_under_test", "kind_under_test"} <= set(
        nanovllm_kit.__all__
    )
    for name in nanovllm_kit.__all__:
        assert getattr(nanovllm_kit, name).__name__ == name
    assert set(nanovllm_kit.__all__) <= set(dir(nanovllm_kit))
    with pytest.raises(AttributeError, match="No nanovllm_kit attribute Suites"):
        getattr(nanovllm_kit, "Suite" + "s")


def test_the_module_that_the_suites_left_names_the_distribution() -> None:
    with pytest.raises(ImportError, match=r"nanovllm_kit: pip install .*kit"):
        import_module("nanovllm_core.testing")


def test_every_check_has_a_sentence() -> None:
    for suite in (Conformance, SpecConformance):
        for name in dir(suite):
            if name.startswith("test_"):
                assert getattr(suite, name).__doc__, name
