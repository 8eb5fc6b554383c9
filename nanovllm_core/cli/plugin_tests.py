"""`nanovllm plugins test`: does an installed plugin keep the contract of its kind?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import typer
import yaml

from nanovllm_core.config_errors import did_you_mean
from nanovllm_core.errors import ConfigError, PluginError, PluginNotFoundError
from nanovllm_core.interfaces.specs import PluginSpec, SchedulerSpec
from nanovllm_core.kinds import EXTENSION, KIND
from nanovllm_core.plugin_discovery import InstalledPlugin
from nanovllm_core.plugin_manager import PluginManager, get_plugin_manager

if TYPE_CHECKING:
    import pytest

SUITES_WITHOUT_SPEC: Mapping[str, str] = {
    EXTENSION: "nanovllm_core.testing.extension:ExtensionConformance",
    KIND: "nanovllm_core.testing.kind:KindConformance",
}
"""The other kinds, the core's and those that plugins declare, name their suites themselves."""

POLICY_SUITE = "nanovllm_core.testing.scheduler:SchedulingPolicyConformance"

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
    name: Annotated[str, typer.Argument(help="The plugin, as a configuration names it.")],
    kind: Annotated[
        str | None, typer.Option(help="Its kind, where plugins of several kinds have that name.")
    ] = None,
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
    manager = get_plugin_manager()
    plugin = _find(manager, name, kind)
    options = dict(_parse(text) for text in option or ())
    if plugin.kind not in SUITES_WITHOUT_SPEC:
        manager.resolve(plugin.kind, name, options, "--option")
    module, _, suite = _suite(manager, plugin).partition(":")
    report = _Report()
    with TemporaryDirectory() as folder:
        # A name of its own: pytest keeps test modules by name for as long as the process lives.
        file = Path(folder, f"test_{Path(folder).name}.py")
        file.write_text(
            TEST_FILE.format(
                module=module, suite=suite, kind=plugin.kind, name=name, options=options
            )
        )
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        arguments = ["-c", str(settings), "--rootdir", folder, "--import-mode=importlib"]
        arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", str(file)]
        arguments += ["-k", only] if only else []
        arguments += [f"--junit-xml={junit.absolute()}"] if junit else []
        typer.echo(f"{plugin.kind} {plugin}: {suite}")
        # The suite is what the core ships: other people's pytest plugins have no say in it.
        quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        with mock.patch.dict(os.environ, quiet):
            status = pytest.main(arguments, plugins=[report])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(f"no check of {suite} has a name with {only!r}")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        problems = "\n".join(report.problems)
        raise PluginError(f"{suite} could not run (pytest's exit status {status}):\n{problems}")
    typer.echo(report.verdict(plugin))
    raise typer.Exit(int(report.failed > 0))


def _find(manager: PluginManager, name: str, kind: str | None) -> InstalledPlugin:
    """The one installed plugin that is meant."""
    if kind is not None:
        return manager.find(kind, name)
    kinds = sorted({plugin.kind for plugin in manager.installed() if plugin.name == name})
    if not kinds:
        known = {plugin.name for plugin in manager.installed()}
        hint = did_you_mean(name, known)
        raise PluginNotFoundError(
            f"no plugin {name!r} is installed{hint}; see `nanovllm plugins list`"
        )
    if len(kinds) > 1:
        choices = " or ".join(f"--kind {kind}" for kind in kinds)
        raise PluginNotFoundError(
            f"plugins of {len(kinds)} kinds are named {name!r}: say {choices}"
        )
    return manager.find(kinds[0], name)


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text!r} must be KEY=VALUE")
    return key, yaml.safe_load(value)


def _suite(manager: PluginManager, plugin: InstalledPlugin) -> str:
    """`"module:Class"` of the suite for a plugin."""
    if plugin.kind in SUITES_WITHOUT_SPEC:
        return SUITES_WITHOUT_SPEC[plugin.kind]
    if plugin.kind == "scheduler" and _is_policy(manager.spec(plugin.kind, plugin.name)):
        return POLICY_SUITE
    return manager.kind(plugin.kind).conformance


def _is_policy(spec: PluginSpec) -> bool:
    return isinstance(spec, SchedulerSpec) and spec.level == "policy"


@dataclass
class _Report:
    """Prints a line per check, and keeps what the verdict needs. A plugin of pytest."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
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
                typer.echo(f"passed   {check}")
            case "skipped":
                self.skipped += 1
                typer.echo(f"skipped  {check}: {_reason(report)}")
            case "failed":
                self.failed += 1
                typer.echo(f"FAILED   {check}: {_first_line(report)}")
                self.details.append(f"{'_' * 20} {check} {'_' * 20}\n{report.longreprtext}")

    def verdict(self, plugin: InstalledPlugin) -> str:
        """What failed in full, then one line."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
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
