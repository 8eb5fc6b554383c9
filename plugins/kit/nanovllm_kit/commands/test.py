"""`nanovllm plugins test`: does an installed plugin keep the contract of its kind?"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest import mock

import typer
from pydantic import ValidationError

from nanovllm_core.cli.plugins import KindOption, Name, installed_plugins, one_plugin
from nanovllm_core.config import explain_options, parse_yaml
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginError,
    PluginNotFoundError,
    shown,
)
from nanovllm_core.interfaces.constraint import ConstraintSpec
from nanovllm_core.interfaces.specs import LogitsProcessorSpec, SchedulerSpec
from nanovllm_core.registry import (
    NO_SPEC,
    SUITE_GROUP,
    InstalledPlugin,
    PluginManager,
    read_options,
)
from nanovllm_kit.commands.report import Report

# Rewritten asserts show the values that they compared, wherever the suite is.
TEST_FILE = """
from functools import cache
import pytest
import nanovllm_kit
nanovllm_kit.rewrite_asserts()  # the command imported the package before pytest
pytest.register_assert_rewrite({module!r})
from nanovllm_kit import installed_plugin
from {module} import {suite}

@cache  # a look at what is installed reads the metadata of all of it
def found():
    return installed_plugin({kind!r}, {name!r}, **{options!r})

class TestPlugin({suite}):
    @pytest.fixture
    def plugin(self):
        return found()
"""


class Level(StrEnum):
    """`nanovllm_kit.conformance.Level`, as typer lists choices."""

    DEFAULT = "default"
    FULL = "full"


OptionFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="An option of the plugin's own; may be repeated."),
]
ArgumentFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="What requests ask of a logits processor or a constraint; may be repeated.",
    ),
]
ReferenceFlag = Annotated[
    str | None,
    typer.Option(
        help="Of a checkpoint source: a checkpoint that it finds, REFERENCE in model: "
        "NAME:REFERENCE. Of a model: the class of transformers to compare with."
    ),
]
TestConfigFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="A setting of the small configuration that a model is tested with; may be repeated.",
    ),
]
LevelFlag = Annotated[
    Level, typer.Option(help="full adds the checks that take minutes or many gigabytes of memory.")
]
SeedFlag = Annotated[
    int, typer.Option(help="Decides the random cases; the same seed draws the same ones.")
]
OnlyFlag = Annotated[
    str | None,
    typer.Option(
        "--only",
        "-k",
        help='Run the checks whose names hold these words; "A or B", "not A" and so on.',
    ),
]
VerboseFlag = Annotated[
    bool, typer.Option("--verbose", "-v", help="Every set of parameters and failure, in full.")
]
JunitFlag = Annotated[Path | None, typer.Option(help="Write a JUnit XML report here.")]


def run_conformance_suite(
    name: Name,
    kind: KindOption = None,
    option: OptionFlag = None,
    argument: ArgumentFlag = None,
    reference: ReferenceFlag = None,
    test_config: TestConfigFlag = None,
    level: LevelFlag = Level.DEFAULT,
    seed: SeedFlag = 0,
    only: OnlyFlag = None,
    verbose: VerboseFlag = False,
    junit: JunitFlag = None,
) -> None:
    """Run the conformance suite of its kind on an installed plugin.

    One line for each check, the plainest first; then where the first failure happened. A check that
    asks for what the plugin does not declare, or what this machine does not have, is skipped with
    the reason; so is a check that is left to --level full. Exit status 1 if a check fails.
    """
    manager = installed_plugins()
    plugin = one_plugin(manager, name, kind)
    options = _parse(option, "--option")
    if plugin.kind not in NO_SPEC:
        _check_options(manager, plugin, options)
    stated: dict[str, Any] = {"level": level.value, "seed": seed}
    if arguments := _parse(argument, "--argument"):
        _check_arguments(manager, plugin, arguments)
        stated["arguments"] = (arguments,)
    if reference is not None or plugin.kind == "model":
        _check_reference(plugin, reference)
    if reference is not None:
        stated["reference_name" if plugin.kind == "model" else "reference"] = reference
    if settings := _parse(test_config, "--test-config"):
        _check_test_config(plugin, settings)
        stated["test_config"] = settings
    suite = _suite(manager, plugin)
    typer.echo(f"{plugin.kind} {plugin}: {suite.partition(':')[2]}, seed {seed}")
    report = Report(verbose)
    _run(_test_file(plugin, suite, options, stated), suite, only, junit, report)
    if left := report.left_to_full():
        typer.echo(f"not tried, left to --level full: {', '.join(left)}")
    typer.echo(report.verdict(plugin))
    raise typer.Exit(int(bool(report.failures)))


def _check_arguments(
    manager: PluginManager, plugin: InstalledPlugin, arguments: Mapping[str, Any]
) -> None:
    """ConfigError for what no request may ask of this plugin."""
    spec = None if plugin.kind in NO_SPEC else manager.spec(plugin.kind, plugin.name)
    if not isinstance(spec, LogitsProcessorSpec | ConstraintSpec):
        raise ConfigError(
            "--argument is what requests ask of a logits processor or a constraint, and "
            f"{plugin.name} is of the kind {plugin.kind}; its settings are --option KEY=VALUE"
        )
    try:
        read_options(spec.arguments, arguments)
    except ValidationError as error:
        what = explain_options(error, spec.arguments, "--argument", str(plugin))
        raise ConfigError(_as_flags(what)) from None


def _check_options(
    manager: PluginManager, plugin: InstalledPlugin, options: Mapping[str, Any]
) -> None:
    """ConfigError for options that the plugin does not take."""
    try:
        manager.resolve(plugin.kind, plugin.name, options, "--option")
    except ConfigError as error:
        raise ConfigError(_as_flags(str(error))) from None


def _as_flags(message: str) -> str:
    """A message about `--option.KEY`, as the flag is typed."""
    typed = re.sub(r"^(--option|--argument)\.", r"\1 ", message, flags=re.MULTILINE)
    missing = r"^(--\w+ \S+): missing; it has no default"
    return re.sub(missing, r"\1: missing; give it with \1=...", typed, flags=re.MULTILINE)


def _check_reference(plugin: InstalledPlugin, reference: str | None) -> None:
    """ConfigError for a model that nothing is there to compare with, and for other kinds."""
    if plugin.kind == "model":
        import transformers

        if not hasattr(transformers, name := reference or plugin.name):
            raise ConfigError(
                f"transformers has no class {shown(name)} to compare {plugin.name} with; name "
                "another by --reference, such as LlamaForCausalLM, or run the package's own tests "
                "with pytest"
            )
    elif plugin.kind != "checkpoint":
        raise ConfigError(
            f"--reference {shown(reference)} is a checkpoint that a source finds, or a model's "
            f"class of transformers, and {plugin.name} is of the kind {plugin.kind}; leave it out"
        )


def _check_test_config(plugin: InstalledPlugin, settings: Mapping[str, Any]) -> None:
    """ConfigError for a plugin that is no model."""
    if plugin.kind != "model":
        raise ConfigError(
            f"--test-config {', '.join(settings)} is for models, and {plugin.name} is of the kind "
            f"{plugin.kind}; its settings are --option KEY=VALUE"
        )


def _test_file(
    plugin: InstalledPlugin, suite: str, options: Mapping[str, Any], stated: Mapping[str, Any]
) -> str:
    """What an author would write, for the installed plugin; `stated` are the class's attributes."""
    module, _, name = suite.partition(":")
    source = TEST_FILE.format(
        module=module, suite=name, kind=plugin.kind, name=plugin.name, options=options
    )
    return source + "".join(f"    {name} = {value!r}\n" for name, value in stated.items())


def _expression(words: str) -> str:
    """What pytest's -k calls the names that are printed: words between operators are one name."""
    parts: list[str] = []
    in_name = False
    for word in re.findall(r"[()]|[^\s()]+", words):
        # Behind a word of a name `not` can only be another one ("is not computed again").
        operator = word in ("(", ")", "and", "or") or (word == "not" and not in_name)
        if in_name and not operator:
            parts[-1] += f"_{word}"
        else:
            parts.append(word)
        in_name = not operator
    return " ".join(parts)


def _run(source: str, suite: str, only: str | None, junit: Path | None, report: Report) -> None:
    """Run the test file of a suite; `report` learns of each check.

    Raises ConfigError where `only` chooses no check, PluginError where pytest cannot run the suite.
    """
    import pytest  # It takes a while; `--help` does not need it.

    more = ["-k", _expression(only)] if only else []
    more += [f"--junit-xml={junit.absolute()}"] if junit else []
    status = _run_pytest(source, more, report)
    if report.interrupted:
        raise KeyboardInterrupt
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        if only:
            raise ConfigError(f"no check of {suite} has a name with {shown(only)}")
        raise ConfigError(f"{suite} has no checks")
    if status == pytest.ExitCode.USAGE_ERROR and only:
        raise ConfigError(
            f"-k {shown(only)} cannot be read; write names, with and, or, not and brackets"
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        problems = "\n".join(report.problems)
        raise PluginError(f"{suite} could not run (pytest's exit status {status}):\n{problems}")


def _run_pytest(source: str, more: Sequence[str], report: Report) -> int:
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


def _parse(texts: Sequence[str] | None, flag: str) -> dict[str, Any]:
    """The values that a flag gave, by their keys; ConfigError for a key that is there twice."""
    given: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag} {shown(text)} must be KEY=VALUE")
        if key in given:
            raise ConfigError(
                f"{flag} {key} is given twice, as {shown(given[key])} and as {shown(value)}; "
                "give it once"
            )
        given[key] = value
    return {key: parse_yaml(value, f"{flag} {key}") for key, value in given.items()}


def _suite(manager: PluginManager, plugin: InstalledPlugin) -> str:
    """`"module:Class"` of the suite for a plugin: a declared kind names its own.

    Raises PluginNotFoundError where none is registered, PluginConflictError for several.
    """
    name = plugin.kind
    if plugin.kind not in NO_SPEC:
        if declared := manager.kind(plugin.kind).conformance:
            return declared
        spec = manager.spec(plugin.kind, plugin.name)
        # The suite of the kind is for whole schedulers.
        if isinstance(spec, SchedulerSpec) and spec.level == "policy":
            name = "scheduler.policy"
    found = [*entry_points(group=SUITE_GROUP, name=name)]
    if not found:
        raise PluginNotFoundError(f"no suite {name!r} is registered in {SUITE_GROUP}")
    if len(found) > 1:
        raise PluginConflictError(
            f"the suite {name!r} is registered as {' and as '.join(one.value for one in found)}; "
            "uninstall the distribution of one"
        )
    return str(found[0].value)
