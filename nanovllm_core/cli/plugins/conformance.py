"""`nanovllm plugins test`: does an installed plugin keep the contract of its kind?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import typer

from nanovllm_core.cli.plugins.choice import KindOption, Name, installed_plugins, one_plugin
from nanovllm_core.config_sources import parse_yaml
from nanovllm_core.errors import ConfigError, PluginError
from nanovllm_core.interfaces.specs import SchedulerSpec
from nanovllm_core.kinds import EXTENSION, KIND, NO_SPEC
from nanovllm_core.plugin_discovery import InstalledPlugin
from nanovllm_core.plugin_manager import PluginManager

if TYPE_CHECKING:
    import pytest

POLICY_SUITE = "nanovllm_core.testing.scheduler:SchedulingPolicyConformance"
"""Of schedulers that are a policy; the kind's own suite is of whole ones."""
SUITES_WITHOUT_SPEC: Mapping[str, str] = {
    EXTENSION: "nanovllm_core.testing.extension:ExtensionConformance",
    KIND: "nanovllm_core.testing.kind:KindConformance",
}

TEST_FILE = """
import pytest
from {module} import {suite}
from nanovllm_core.testing import installed_plugin

class TestPlugin({suite}):
    @pytest.fixture
    def plugin(self):
        return installed_plugin({kind!r}, {name!r}, **{options!r})
"""


def run_conformance_suite(
    name: Name,
    kind: KindOption = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the plugin's own; may be repeated."),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", "-k", help="Run the checks whose names hold this.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit XML report here.")] = None,
) -> None:
    """Run the conformance suite of its kind on an installed plugin.

    One line for each check. A check that asks for what the plugin does not declare, or what this
    machine does not have, is skipped with the reason. Exit status 1 if a check fails.
    """
    try:
        import pytest
    except ModuleNotFoundError:
        raise PluginError(
            'nanovllm plugins test needs pytest: pip install "nanovllm-core[testing]"'
        ) from None
    manager = installed_plugins()
    plugin = one_plugin(manager, name, kind)
    options = dict(_parse(text) for text in option or ())
    if plugin.kind not in NO_SPEC:
        manager.resolve(plugin.kind, name, options, "--option")
    suite = _suite(manager, plugin)
    typer.echo(f"{plugin.kind} {plugin}: {suite.partition(':')[2]}")
    report = _Report()
    more = ["-k", only] if only else []
    more += [f"--junit-xml={junit.absolute()}"] if junit else []
    status = _run(_test_file(plugin, suite, options), more, report)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        what = f"no check of {suite} has a name with {only!r}" if only else f"{suite} has no checks"
        raise ConfigError(what)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        problems = "\n".join(report.problems)
        raise PluginError(f"{suite} could not run (pytest's exit status {status}):\n{problems}")
    typer.echo(report.verdict(plugin))
    raise typer.Exit(int(report.failed > 0))


def _test_file(plugin: InstalledPlugin, suite: str, options: Mapping[str, Any]) -> str:
    """What an author would write, for the installed plugin."""
    module, _, name = suite.partition(":")
    return TEST_FILE.format(
        module=module, suite=name, kind=plugin.kind, name=plugin.name, options=options
    )


def _run(source: str, more: Sequence[str], report: _Report) -> int:
    """Run a test file by pytest in this process; its exit status."""
    import pytest

    with TemporaryDirectory() as folder:
        # A name of its own: pytest keeps test modules by name for as long as the process lives.
        file = Path(folder, f"test_{Path(folder).name}.py")
        file.write_text(source, encoding="utf-8")
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        arguments = ["-c", str(settings), "--rootdir", folder, "--import-mode=importlib"]
        arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", *more, str(file)]
        # The suite is what the core ships: other people's pytest plugins have no say in it.
        quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        with mock.patch.dict(os.environ, quiet):
            return int(pytest.main(arguments, plugins=[report]))


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text!r} must be KEY=VALUE")
    return key, parse_yaml(value, f"--option {key}")


def _suite(manager: PluginManager, plugin: InstalledPlugin) -> str:
    """`"module:Class"` of the suite for a plugin: its kind's, which may be a declared one."""
    if plugin.kind in NO_SPEC:
        return SUITES_WITHOUT_SPEC[plugin.kind]
    spec = manager.spec(plugin.kind, plugin.name)
    if isinstance(spec, SchedulerSpec) and spec.level == "policy":
        return POLICY_SUITE
    return manager.kind(plugin.kind).conformance


@dataclass
class _Report:
    """Prints a line per check, and keeps what the verdict needs. A plugin of pytest."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    tested: set[str] = field(default_factory=set)
    untested: set[str] = field(default_factory=set)
    """Checks that passed, or were skipped, with any of their parameters."""
    details: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be imported has no checks at all."""
        if report.failed:
            self.problems.append(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check counts by its call, or by the phase that did not let it get there."""
        if report.when != "call" and report.passed:
            return
        check = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        match report.outcome:
            case "passed":
                self.passed += 1
                self.tested.add(check.partition("[")[0])
                typer.echo(f"passed   {check}")
            case "skipped":
                self.skipped += 1
                self.untested.add(check.partition("[")[0])
                typer.echo(f"skipped  {check}: {_reason(report)}")
            case "failed":
                self.failed += 1
                typer.echo(f"FAILED   {check}: {_first_line(report)}")
                self.details.append(f"{'_' * 20} {check} {'_' * 20}\n{report.longreprtext}")

    def verdict(self, plugin: InstalledPlugin) -> str:
        """What failed in full, then one line."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        if not self.failed and len(self.untested - self.tested) > len(self.tested):
            return f"{plugin.name} was hardly tested here, and broke nothing: {counts}"
        if not self.failed:
            return f"{plugin.name} keeps the contract of {plugin.kind} plugins here: {counts}"
        details = "\n\n".join(["", *self.details, ""])
        return f"{details}{plugin.name} BREAKS the contract of {plugin.kind} plugins: {counts}"


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return str(text).strip().partition("\n")[0]
