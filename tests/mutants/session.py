"""One pytest session in a forked process: chosen tests in a copy of the tree, told as it goes.

The driver has imported what takes seconds (torch, pytest, hypothesis) and nothing of the copy. Each
session forks from it, so the copy's modules are imported afresh and a crash harms nobody.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

Send = Callable[[Mapping[str, Any]], None]
OPTIONS = (
    *("-q", "--tb=short", "-m", "not slow and not gpu", "--hypothesis-seed=0"),
    # The last two collect garbage for half a second at the end.
    *(f"-pno:{name}" for name in ("cacheprovider", "xdist", "unraisableexception")),
    "-pno:threadexception",
)


@dataclass(eq=False)
class Reporter:
    """A pytest plugin that runs `chosen` (all if empty) and sends each test as it starts.

    With `coverage`, the lines that run are noted by test, those of set-up apart: a fixture that
    several tests share is set up by the first of them.
    """

    send: Send
    chosen: frozenset[str] = frozenset()
    coverage: Coverage | None = None
    passed: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen:
            items[:] = [item for item in items if item.nodeid in self.chosen]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} cannot be collected")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.send({"test": item.nodeid})
        begin, failures = _cpu_seconds(), len(self.failed)
        result = yield
        if len(self.failed) == failures:
            self.passed[item.nodeid] = round(_cpu_seconds() - begin, 3)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.coverage:
            self.coverage.switch_context(f"{item.nodeid}|setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if self.coverage:
            self.coverage.switch_context(f"{item.nodeid}|call")


def run(send: Send, arguments: Sequence[str], chosen: frozenset[str]) -> None:
    """Run the chosen tests of the files among pytest's arguments; sends those that failed."""
    reporter = Reporter(send, chosen)
    code = pytest.main([*OPTIONS, *arguments], plugins=[reporter])
    send({"failed": reporter.failed, "passed": reporter.passed} | _ending(code))


def record(send: Send, copy: Path, files: Sequence[str], rooms: Sequence[str]) -> None:
    """Run these files; sends each passed test's seconds of CPU and the lines of `rooms` it runs."""
    coverage = Coverage(
        data_file=None, config_file=False, include=[str(copy / room / "*") for room in rooms]
    )
    reporter = Reporter(send, coverage=coverage)
    coverage.start()
    code = pytest.main([*OPTIONS, *files], plugins=[reporter])
    coverage.stop()
    data = coverage.get_data()
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            if tests := [context for context in contexts if context]:
                lines[str(Path(file).relative_to(copy))][line] = tests
    send({"failed": reporter.failed, "passed": reporter.passed, "lines": lines} | _ending(code))


def _ending(code: int) -> dict[str, Any]:
    """What pytest returned, and where it ran no tests what it printed last."""
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return {"code": int(code)}
    sys.stdout.flush()
    return {"code": int(code), "output": Path("../output.txt").read_text(errors="replace")[-2000:]}


def become_session(copy: Path, imports: Sequence[str]) -> None:
    """Turn a forked process into one whose modules, and subprocesses' modules, are the copy's."""
    os.setsid()
    os.chdir(copy)
    with (copy.parent / "output.txt").open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    mine = [str(copy / folder) for folder in imports]
    checkout = Path(__file__).parents[2]
    others = [
        p
        for p in sys.path
        if p and (Path(p).name == "site-packages" or checkout not in (Path(p), *Path(p).parents))
    ]
    sys.path[:] = [*mine, *others]
    for module in [m for m in sys.modules if m.split(".")[0] == "tests"]:
        del sys.modules[module]
    importlib.invalidate_caches()
    temporary = copy.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    os.environ |= {"PYTHONPATH": os.pathsep.join(mine), "TMPDIR": str(temporary)}
    # Compiled once for all sessions, whatever the surroundings say: the copy is ours.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def sender(pipe: int) -> Send:
    """What writes messages to the driver, one JSON object a line."""

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(pipe, data) :]

    return send


def _cpu_seconds() -> float:
    """This process's and its children's."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
