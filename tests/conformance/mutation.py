"""Copies of shipped code with one bug planted in each, and the suites that must find it.

A copy lies in a folder of its own under another module name, so that what is installed is never
touched. `Subject.assert_caught` plants the bug, runs the named check on the copy in a
pytest of its own, and fails unless the check fails.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from _pytest.mark import ParameterSet

from nanovllm_core import layers

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One bug: texts of one file and what stands there instead, each found exactly once.

    `caught_by` is the check whose subject the bug is; `peers` the number of the bug in the list of
    those that other engines had, where it is one of them.
    """

    name: str
    file: str
    edits: Edits
    caught_by: str
    peers: int | None = None

    def apply(self, source: str) -> str:
        """The file with the bug; LookupError where a text is not there exactly once."""
        for old, new in self.edits:
            if source.count(old) != 1:
                raise LookupError(f"{self.name}: {self.file} holds {source.count(old)} of {old!r}")
            source = source.replace(old, new)
        return source


def numbered(names: Sequence[str], every: int) -> list[ParameterSet]:
    """Parameters for the bugs of these names; `make test` plants one of `every`, in order."""
    return [
        pytest.param(number, id=name, marks=[pytest.mark.slow] if number % every else [])
        for number, name in enumerate(names)
    ]


@dataclass
class Outcomes:
    """A pytest plugin that notes how each check ended, over all its parameters."""

    of: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    messages: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Failures of fixtures count as errors: they prove nothing about a check."""
        check = report.nodeid.split("::")[-1].split("[")[0]
        if report.when == "call" or report.outcome != "passed":
            self.of[check].add(report.outcome if report.when == "call" else f"{report.when} error")
        if report.failed:
            self.messages.append(report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A copy that cannot be imported is no proof either."""
        if report.failed:
            raise RuntimeError(report.longreprtext)


LAYERS = """
from importlib import import_module
from nanovllm_core import layers

HOMES = {homes!r}

def __getattr__(name):
    return getattr(import_module(HOMES[name]) if name in HOMES else layers, name)
"""
"""The copy's own `nanovllm_core.layers`: the names of the inlined modules, all else forwarded."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A package to plant bugs in. `suite` is a test file, in which COPY stands for the copy.

    `inlined` are modules of the core that the package is mostly made of. They are copied into it
    (`nanovllm_core.layers.decoder` as COPY.decoder, in `decoder.py`), so that a bug planted there
    is one of the copy alone; the copy imports COPY.layers instead of `nanovllm_core.layers`.
    """

    package: str
    suite: str
    inlined: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the shipped source lies."""
        file = importlib.import_module(self.package).__file__
        assert file is not None
        return Path(file).parent

    def files(self) -> Iterator[tuple[str, str]]:
        """(name in the copy, source) of every module."""
        for path in self.folder.rglob("*.py"):
            yield path.relative_to(self.folder).as_posix(), path.read_text(encoding="utf-8")
        for module in self.inlined:
            yield f"{module.split('.')[-1]}.py", inspect.getsource(importlib.import_module(module))

    def renamed(self, name: str) -> dict[str, str]:
        """What is called otherwise in the copy: modules, by their full names."""
        inlined = {module: f"{name}.{module.split('.')[-1]}" for module in self.inlined}
        own_layers = {"nanovllm_core.layers": f"{name}.layers"} if inlined else {}
        return {self.package: name, **inlined, **own_layers}

    def homes(self, renamed: dict[str, str]) -> dict[str, str]:
        """The public names of the inlined modules, and where the copy has them."""
        modules = {
            public: getattr(value, "__module__", None) for public, value in vars(layers).items()
        }
        return {public: renamed[str(m)] for public, m in modules.items() if m in self.inlined}

    @contextmanager
    def copied(self, target: Path, name: str, mutation: Mutation | None) -> Iterator[Path]:
        """Put the copy on sys.path as `name`, with its suite beside it; yields the suite's file."""
        renamed = self.renamed(name)
        for file, source in self.files():
            if mutation is not None and file == mutation.file:
                source = mutation.apply(source)
            for old, new in renamed.items():
                # A module of the package goes with it; one inside a door of the core stays.
                end = r"\b" if old == self.package else r"(?![\w.])"
                source = re.sub(rf"\b{re.escape(old)}{end}", new, source)
            place = target / name / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(source)
        if self.inlined:
            (target / name / "layers.py").write_text(LAYERS.format(homes=self.homes(renamed)))
        suite = target / f"test_{name}.py"
        suite.write_text(self.suite.replace("COPY", name))
        sys.path.insert(0, str(target))
        importlib.invalidate_caches()
        try:
            yield suite
        finally:
            sys.path.remove(str(target))
            for module in [m for m in sys.modules if m.split(".")[0] in (name, suite.stem)]:
                del sys.modules[module]

    def run(
        self,
        target: Path,
        name: str,
        mutation: Mutation | None = None,
        checks: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> Outcomes:
        """Run these checks of the suite, or all, on a copy with or without a bug.

        `more` are further arguments of pytest.
        """
        outcomes = Outcomes()
        with self.copied(target, name, mutation) as suite:
            chosen = [f"{suite}::TestCopy::{check}" for check in checks] or [str(suite)]
            quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
            quiet += ["-p", "no:unraisableexception"]  # it collects garbage twice at the end
            alone = ["--rootdir", str(target), "-c", str(target / "none.ini"), "--noconftest"]
            (target / "none.ini").touch()
            # To look for plugins of pytest takes as long as many a check.
            with mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}):
                pytest.main([*quiet, *alone, *more, *chosen], plugins=[outcomes])
        if not outcomes.of:
            raise LookupError(f"the suite has none of {', '.join(checks)}")
        return outcomes

    def assert_caught(self, target: Path, number: int, mutation: Mutation) -> None:
        """The named check fails on a copy with the bug."""
        name = f"{self.package.split('.')[-1]}_with_bug_{number}"
        outcomes = self.run(target, name, mutation, [mutation.caught_by], ["--exitfirst"])
        assert outcomes.of[mutation.caught_by] & {"failed"}, (mutation.name, dict(outcomes.of))

    def assert_passes(self, target: Path, mutations: Sequence[Mutation] = ()) -> None:
        """A copy without a bug passes every check that catches one of these, or the whole suite."""
        checks = sorted({mutation.caught_by for mutation in mutations})
        outcomes = self.run(target, f"{self.package.split('.')[-1]}_copy", checks=checks)
        assert not outcomes.messages, "\n".join(outcomes.messages)
        assert outcomes.of.keys() >= set(checks)
        assert all("passed" in outcomes.of[check] for check in checks), dict(outcomes.of)
