"""Is a plugin's package right? Checked without running it: behind `nanovllm plugins validate`.

    validate_package(Path("scheduler_fair"))       # a folder with a pyproject.toml
    validate_installed(get_plugin_manager().find("scheduler", "sjf"))

Entry points are looked at in a fresh process (this module run as a program), so that what they
import shows, and nothing of theirs stays here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from nanovllm_core.errors import (
    NanoVLLMError,
    PluginLoadError,
    PluginNotFoundError,
    did_you_mean,
    shown,
)
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.registry import (
    COMMAND_GROUP,
    CORE,
    EXTENSION,
    GROUP_PREFIX,
    KIND,
    KIND_GROUP,
    SUITE_GROUP,
    InstalledPlugin,
    core_requirement,
    get_plugin_manager,
    known_groups,
    load_object,
)

CODE_GROUPS = {COMMAND_GROUP: "command", SUITE_GROUP: "suite"}
"""Entry points that are no plugins: each names what is imported when it is used."""

HEAVY = ("torch", "triton", "transformers")

Entry = tuple[str, str, str]
"""Group, name and target of an entry point."""


def validate_package(folder: Path) -> list[DoctorCheck]:
    """Metadata, files and entry points of a package that need not be installed.

    Raises PluginNotFoundError where the folder holds no pyproject.toml that can be read.
    """
    project = _read_project(folder)
    entries, misshapen = _read_entries(project)
    checks = [_check_readme(folder, project), _check_requires_core(project), *misshapen]
    if not entries and not misshapen:
        checks.append(
            DoctorCheck(
                "entry points",
                False,
                "none in a group of nanovllm's, so no plugin would be found",
                'add [project.entry-points."nanovllm.KIND"] with NAME = "package.module"; groups: '
                f"{', '.join(sorted({*known_groups(), *CODE_GROUPS}))}",
            )
        )
    return checks + validate_entries(entries, [folder.absolute(), (folder / "src").absolute()])


def validate_installed(plugin: InstalledPlugin) -> list[DoctorCheck]:
    """The entry point of an installed plugin."""
    declared = (entry.name for entry in entry_points(group=KIND_GROUP))
    [group] = [group for group, kind in known_groups(declared).items() if kind == plugin.kind]
    return validate_entries([(group, plugin.name, plugin.entry_point)], [])


def validate_entries(entries: Sequence[Entry], paths: Sequence[Path]) -> list[DoctorCheck]:
    """Check each entry point in a fresh process that has `paths` before its own."""
    checks = []
    for entry in entries:
        result = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps([*entry, entries])],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, *sys.path]))},
            capture_output=True,
            text=True,
            check=False,
        )
        answer = result.stdout.splitlines()[-1:]
        if result.returncode or not answer:  # what an import can do beyond raising: exit, crash
            last = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
            checks.append(_wrong(entry[1], f"importing {entry[2]} ended the process: {last[0]}"))
            continue
        found = json.loads(answer[0])
        checks += [DoctorCheck(**check) for check in found]
    return checks


# -------------------------------------------------------------------------------- the package


def _read_project(folder: Path) -> Mapping[str, Any]:
    file = folder / "pyproject.toml"
    remedy = "give the folder of a package, or the name of an installed plugin"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError) as error:
        raise PluginNotFoundError(f"{_why_no_package(file, error)}; {remedy}") from error
    if not isinstance(project, dict):
        problem = f"{file} has no [project] table, but project = {shown(project)}"
        raise PluginNotFoundError(f"{problem}; {remedy}")
    return project


def _read_entries(project: Mapping[str, Any]) -> tuple[list[Entry], list[DoctorCheck]]:
    """The entry points in groups of nanovllm's, and a check for each value of a wrong type."""
    groups = project.get("entry-points", {})
    if not isinstance(groups, dict):
        must = 'it must be a table of tables, [project.entry-points."nanovllm.KIND"]'
        return [], [_wrong("entry points", f"project.entry-points is {shown(groups)}; {must}")]
    entries: list[Entry] = []
    wrong: list[DoctorCheck] = []
    for group, named in groups.items():
        if not group.startswith(GROUP_PREFIX):
            continue
        if not isinstance(named, dict):
            must = 'it must be a table of NAME = "package.module"'
            wrong.append(_wrong(group, f"the group is {shown(named)}; {must}"))
            continue
        for name, target in named.items():
            if isinstance(target, str):
                entries.append((group, name, target))
            else:
                must = 'it must be text, as in "package.module"'
                wrong.append(_wrong(name, f"its target in {group} is {shown(target)}; {must}"))
    return entries, wrong


def _why_no_package(file: Path, error: Exception) -> str:
    if not file.parent.exists():
        return f"the folder {str(file.parent)!r} does not exist"
    if isinstance(error, FileNotFoundError):
        return f"{str(file.parent)!r} holds no pyproject.toml"
    if isinstance(error, KeyError):
        return f"{file} has no [project] table"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{file} cannot be read: {reason}"


def _check_readme(folder: Path, project: Mapping[str, Any]) -> DoctorCheck:
    """A package works without one; one that its metadata names and that is not there stops pip."""
    named = project.get("readme")
    named = named.get("file") if isinstance(named, dict) else named
    name = str(named or "README.md")
    if (folder / name).is_file():
        return DoctorCheck(name, True, "there")
    if named:
        remedy = "write it, or take readme out of pyproject.toml: as it is, pip cannot install it"
        return DoctorCheck(name, False, "missing, and pyproject.toml names it", remedy)
    detail = "none; whoever chooses the plugin looks there for what it does and its options"
    return DoctorCheck(name, False, detail)


def _check_requires_core(project: Mapping[str, Any]) -> DoctorCheck:
    lines = project.get("dependencies", [])
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        must = f'it must be a list of texts, as in ["{CORE}>=VERSION"]'
        return _wrong("dependencies", f"project.dependencies is {shown(lines)}; {must}")
    found = core_requirement(lines)
    if found or project.get("name") == CORE:
        return DoctorCheck("dependencies", True, str(found or f"it is {CORE}"))
    return DoctorCheck(
        "dependencies",
        False,
        f"{CORE} is not among them, so any version, or none, would be installed with it",
        f'add "{CORE}>=VERSION" with the version that it was written for',
    )


# --------------------------------------------------------------------- in the fresh process


def _check_entry(group: str, name: str, target: str, others: Sequence[Entry]) -> list[DoctorCheck]:
    """One entry point, from its group to the code that it names; stops at what hides the rest.

    `others` are those of the same package: one may declare the kind of another.
    """
    if group in CODE_GROUPS:
        return [_check_code(f"{CODE_GROUPS[group]} {name}", target)]
    mine = [EntryPoint(other, its_target, its_group) for its_group, other, its_target in others]
    declared = {entry.name for entry in mine if entry.group == KIND_GROUP}
    mine += [e for e in entry_points(group=KIND_GROUP) if e.name not in declared]
    kinds = known_groups(entry.name for entry in mine if entry.group == KIND_GROUP)
    if group not in kinds:
        problem = (
            f"the group {group!r} is no kind of plugin{did_you_mean(group, kinds, GROUP_PREFIX)}"
        )
        return [_wrong(name, f"{problem}; groups: {', '.join(sorted(kinds))}")]
    kind = kinds[group]
    label = f"{kind} {name}"
    manager = get_plugin_manager(entry_points=mine)
    try:
        if kind == EXTENSION:
            manager.enable([name])
            return [DoctorCheck(label, True, "its hooks fit"), *_check_light(label, target)]
        if kind == KIND:
            declaration = manager.kind(name)
            detail = f"declares {declaration.group}, contract {declaration.contract}"
            return [
                DoctorCheck(label, True, detail),
                *_check_light(label, target),
                _check_suite(label, declaration.conformance),
                *([_check_code(label, declaration.interface)] if declaration.interface else []),
            ]
        spec = manager.spec(kind, name)
        checks = [
            DoctorCheck(label, True, f"{type(spec).__name__}, contract {spec.contract}"),
            *_check_light(label, target),
            *_check_options(label, spec.options),
        ]
        load_object(spec.impl)
        return [*checks, DoctorCheck(label, True, f"{spec.impl} can be imported")]
    except NanoVLLMError as error:
        return [_wrong(label, str(error))]


def _check_code(label: str, target: str) -> DoctorCheck:
    """A command or a suite: its target is imported when it is used."""
    try:
        load_object(target)
    except PluginLoadError as error:
        return _wrong(label, str(error))
    return DoctorCheck(label, True, f"{target} can be imported")


def _check_light(label: str, target: str) -> Iterable[DoctorCheck]:
    """What importing the light module, which is all that happened so far, has brought along."""
    heavy = [module for module in HEAVY if module in sys.modules]
    if not heavy:
        return [DoctorCheck(label, True, f"importing {target} imports none of {', '.join(HEAVY)}")]
    detail = f"importing {target} imports {', '.join(heavy)}, and so would every listing"
    remedy = 'name the code by impl="package.module:Object" and import it there'
    return [DoctorCheck(label, False, detail, remedy)]


def _check_suite(label: str, suite: str) -> DoctorCheck:
    """The suite of a declared kind can be imported."""
    try:
        load_object(suite)
    except PluginLoadError as error:
        return _wrong(label, f"its suite cannot be loaded: {error}")
    return DoctorCheck(label, True, f"its suite {suite} can be imported")


def _check_options(label: str, options: Any) -> Iterable[DoctorCheck]:
    """Options that an editor can complete, each with its words."""
    silent = [name for name, field in options.model_fields.items() if not field.description]
    options.model_json_schema()
    if silent:
        detail = f"{options.__name__}: {', '.join(silent)} without a description"
        return [DoctorCheck(label, False, detail, "add Field(description=...)")]
    known = ", ".join(options.model_fields) or "none"
    return [DoctorCheck(label, True, f"options: {known}; unknown ones are errors")]


def _wrong(label: str, detail: str) -> DoctorCheck:
    return DoctorCheck(label, False, detail, "correct it, then validate again", fatal=True)


def _main(request: str) -> None:
    print(json.dumps([asdict(check) for check in _check_entry(*json.loads(request))]))


if __name__ == "__main__":
    _main(sys.argv[1])
