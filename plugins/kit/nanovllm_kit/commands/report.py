"""What `nanovllm plugins test` prints: a line for each check, then the first failure in short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from nanovllm_core.errors import PluginLoadError
from nanovllm_core.registry import InstalledPlugin

if TYPE_CHECKING:
    import pytest

WORDS = {"passed": "passed  ", "skipped": "skipped ", "failed": "FAILED  "}


@dataclass(frozen=True, slots=True)
class Case:
    """How a check ended, with one set of parameters; `why` is a line, `details` a traceback."""

    check: str
    parameters: str
    outcome: str
    why: str = ""
    details: str = ""


@dataclass
class Report:
    """A plugin of pytest that prints a line per check, and keeps what the verdict needs.

    `verbose`: each set of parameters has a line of its own, and each failure its whole traceback.
    """

    verbose: bool = False
    cases: dict[str, Case] = field(default_factory=dict)
    """By pytest's id, in the order in which they ran."""
    problems: list[str] = field(default_factory=list)
    """Why the suite has no checks at all."""
    left: Counter[str] = field(default_factory=Counter)
    """How many cases of each check have not ended."""
    interrupted: bool = False
    """Ctrl-C ended the run."""
    without_code: bool = False
    """The implementation could not be loaded, so the checks that are left would say so again."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """The option --tb is the terminal plugin's, which is off; what it sets is not."""
        config.option.tbstyle = "long" if self.verbose else "short"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be imported has no checks at all."""
        if report.failed:
            self.problems.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Knowing how many cases a check has, its line is printed with the last of them."""
        self.left = Counter(_names(item.nodeid)[0] for item in session.items)

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object]
    ) -> None:
        """Stop where the implementation cannot be loaded: every other check would fail alike."""
        if call.excinfo is not None and call.excinfo.errisinstance(PluginLoadError):
            self.without_code = True
            node.session.shouldfail = "the implementation cannot be loaded"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C; of checks that cannot be collected the same hook tells, by a subclass of it."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check counts by its call, or by the phase that did not let it get there."""
        if report.when != "call" and report.passed:
            return
        why = {"passed": "", "skipped": _reason(report)}.get(report.outcome, _first_line(report))
        details = report.longreprtext if report.failed else ""
        check, parameters = _names(report.nodeid)
        self.cases[report.nodeid] = Case(check, parameters, report.outcome, why, details)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Print a check's lines with the last of its cases."""
        check = _names(nodeid)[0]
        self.left[check] -= 1
        if not self.left[check]:
            cases = [case for case in self.cases.values() if case.check == check]
            for line in _lines(cases, self.verbose):
                typer.echo(line)

    def left_to_full(self) -> list[str]:
        """The checks that this level did not try."""
        from nanovllm_kit.conformance import LEFT_TO_FULL

        cases = (case for case in self.cases.values() if case.why.startswith(LEFT_TO_FULL))
        return list(dict.fromkeys(case.check for case in cases))

    @property
    def failures(self) -> list[Case]:
        """In the order in which they ran."""
        return [case for case in self.cases.values() if case.outcome == "failed"]

    def verdict(self, plugin: InstalledPlugin) -> str:
        """What failed first, or with `verbose` all that failed; the last line sums up."""
        count = Counter(case.outcome for case in self.cases.values())
        counts = f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
        tested = {case.check for case in self.cases.values() if case.outcome == "passed"}
        tested -= _checks_of_every_kind()
        untested = {case.check for case in self.cases.values() if case.outcome == "skipped"}
        if not self.failures and len(untested - tested) > len(tested):
            return f"{plugin.name} was hardly tested here, and broke nothing: {counts}"
        if not self.failures:
            return f"{plugin.name} keeps the contract of {plugin.kind} plugins here: {counts}"
        last = f"{plugin.name} BREAKS the contract of {plugin.kind} plugins: {counts}"
        if self.without_code:
            last += f"; {self.left.total()} not run, for its code cannot be loaded"
        elif len(self.failures) > 1 and not self.verbose:
            last += " (--verbose has every failure in full)"
        shown = self.failures if self.verbose else self.failures[:1]
        return "\n\n".join(["", *map(_section, shown), last])


def _checks_of_every_kind() -> set[str]:
    """Those that look at a spec, and say nothing of how a plugin does the work of its kind."""
    from nanovllm_kit import SpecConformance

    return {_names(name)[0] for name in dir(SpecConformance) if name.startswith("test_")}


def _names(nodeid: str) -> tuple[str, str]:
    """The check, as it is printed, and its parameters, in brackets."""
    name, bracket, parameters = nodeid.rpartition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " "), bracket + parameters


def _lines(cases: Iterable[Case], verbose: bool) -> Iterator[str]:
    """One for each way in which a check's cases ended; skips for one reason count as one way."""
    ways: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        why = case.why if case.outcome == "skipped" else ""
        ways.setdefault((case.outcome, case.parameters if verbose else why), []).append(case)
    for (outcome, _), alike in ways.items():
        first = alike[0]
        which = first.parameters
        if len(alike) > 1:
            example = f", first {first.parameters}" if outcome == "failed" else ""
            which = f" ({len(alike)} cases{example})"
        yield f"{WORDS[outcome]} {first.check}{which}" + (f": {first.why}" if first.why else "")


def _section(failure: Case) -> str:
    return f"{'_' * 20} {failure.check}{failure.parameters} {'_' * 20}\n{failure.details}"


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return str(text).strip().partition("\n")[0]
