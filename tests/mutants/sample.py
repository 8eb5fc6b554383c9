"""A seeded sample of mutants, the tests that run each, and the report of what survived."""

from __future__ import annotations

import json
import random
import subprocess
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import partial
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

import pytest

from . import session
from .forks import Outcome, Pool, Task
from .operators import Key, Mutant, mutants_of
from .recording import Project, Recording, mentions_of, record

SECONDS_PER_MUTANT = 60.0
"""CPU time of the tests that are run for a mutant, by what they took unchanged: the quickest."""
STALLED_S = 10.0
"""Seconds that a test may take beyond ten times its own."""
KILLED, SURVIVED, LISTED = "killed", "survived", "listed"


@dataclass(kw_only=True)
class Verdict:
    """What became of a mutant; `ran` of the tests that run its lines were tried."""

    room: str
    mutant: Mutant
    fate: str
    why: str
    ran: Sequence[str] = ()
    covering: int = 0

    def described(self) -> dict[str, Any]:
        """As JSON."""
        file, function, original, mutated = self.mutant.key
        return {
            "room": self.room,
            "file": file,
            "line": self.mutant.line,
            "function": function,
            "original": original,
            "mutated": mutated,
            "fate": self.fate,
            "why": self.why,
            "tests_run": len(self.ran),
            "tests_covering": self.covering,
        }


@dataclass
class Sample:
    """The project's mutants, by room and line, and those drawn."""

    project: Project
    recording: Recording
    sources: dict[str, str] = field(default_factory=dict)
    lines: dict[str, dict[tuple[str, int], list[Mutant]]] = field(default_factory=dict)
    unreached: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for room in self.project.rooms:
            self.sources |= self.project.sources(room)
        self._mentions = mentions_of(self.sources)
        for room in self.project.rooms:
            by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
            for file, source in self.project.sources(room):
                for mutant in mutants_of(file, source):
                    by_line[file, mutant.line].append(mutant)
            self.lines[room] = {at: found for at, found in by_line.items() if self.tests(found[0])}
            self.unreached[room] = len(by_line) - len(self.lines[room])

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run the mutant's lines, in the order in which to try them."""
        return self.recording.tests_of(mutant, self._mentions)

    def draw(self, seed: int, count: int) -> Iterator[tuple[str, Mutant]]:
        """One mutant of each of `count` lines, as many from each room as it has and can be."""
        rng = random.Random(seed)
        for index, room in enumerate(self.project.rooms):
            share = count // len(self.project.rooms) + (index < count % len(self.project.rooms))
            lines = sorted(self.lines[room])
            for at in rng.sample(lines, min(share, len(lines))):
                found = self.lines[room][at]
                for mutant in rng.sample(found, len(found)):
                    if _compiles(mutant.apply(self.sources[mutant.file])):
                        yield room, mutant
                        break


def examine(
    project: Project,
    folder: Path,
    *,
    state: Path,
    equivalents: Path,
    seed: int,
    count: int,
    jobs: int,
) -> int:
    """Draw, run and report; the exit status. `folder` holds the copies, `state` what stays."""
    begin = monotonic()
    listed = read_equivalents(equivalents, keys_of(project))  # before the long recording
    pool = Pool(project.root, project.files, folder, project.imports, jobs)
    recording = record(project, pool, state / "recordings", _tell)
    sample = Sample(project, recording)
    verdicts = list(_run(sample, pool, list(sample.draw(seed, count)), listed))
    report = {
        "seed": seed,
        "lines": len(verdicts),
        "commit": _commit(project.root),
        "minutes": round((monotonic() - begin) / 60, 1),
        "tests": len(recording.seconds),
        "tests_failing_unchanged": recording.failed,
        "rooms": {
            room: {
                **{fate: 0 for fate in (KILLED, SURVIVED, LISTED)},
                **Counter(v.fate for v in verdicts if v.room == room),
                "lines_reached": len(sample.lines[room]),
                "lines_unreached": sample.unreached[room],
            }
            for room in project.rooms
        },
        "mutants": [verdict.described() for verdict in verdicts],
    }
    survivors = [verdict for verdict in verdicts if verdict.fate == SURVIVED]
    text = "\n".join([*(_shown(v, sample.sources) for v in survivors), *_summary(report)])
    (state / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (state / "report.txt").write_text(text + "\n", encoding="utf-8")
    _tell(text)
    return 1 if survivors else 0


def keys_of(project: Project) -> set[Key]:
    """What identifies the mutants that there are."""
    sources = (source for room in project.rooms for source in project.sources(room))
    return {mutant.key for file, source in sources for mutant in mutants_of(file, source)}


def read_equivalents(file: Path, known: Iterable[Key]) -> dict[Key, str]:
    """The reasons of the mutants that change no behaviour. LookupError for one that is no more."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("equivalent", [])
    listed: dict[Key, str] = {
        (one["file"], one["function"], one["original"], one["mutated"]): one["reason"]
        for one in entries
    }
    if stale := sorted(listed.keys() - set(known)):
        lines = "\n".join(" | ".join(key) for key in stale)
        raise LookupError(f"{file.name} lists mutants that do not exist; remove them:\n{lines}")
    return listed


def _run(
    sample: Sample, pool: Pool, drawn: Sequence[tuple[str, Mutant]], listed: Mapping[Key, str]
) -> Iterator[Verdict]:
    """The verdicts; a kill counts if the test that failed passes where nothing is changed."""
    verdicts: dict[str, Verdict] = {}
    tasks: list[Task] = []
    for room, mutant in drawn:
        name = f"{mutant.file}:{mutant.line} {mutant.mutated}"
        reason = listed.get(mutant.key)
        if reason is not None:
            yield Verdict(room=room, mutant=mutant, fate=LISTED, why=reason)
            continue
        covering = sample.tests(mutant)
        ran = affordable(covering, sample.recording.seconds)
        verdicts[name] = Verdict(
            room=room, mutant=mutant, fate=SURVIVED, why="", ran=ran, covering=len(covering)
        )
        change = (mutant.file, mutant.apply(sample.sources[mutant.file]))
        tasks.append(_task(name, ran, sample.recording.seconds, change=change, options=["-x"]))
    for done, outcome in enumerate(pool.run(tasks), start=1):
        verdict = verdicts[outcome.task.name]
        if why := _killer(outcome):
            verdict.fate, verdict.why = KILLED, why
        _tell(f"{done}/{len(tasks)} {verdict.fate} {outcome.task.name}")
    seconds = sample.recording.seconds
    killers = {v.why for v in verdicts.values()} & seconds.keys() or {min(seconds, key=seconds.get)}
    for test in _failing_unchanged(sorted(killers), seconds, pool):
        for verdict in verdicts.values():
            if verdict.why == test:
                verdict.fate, verdict.why = SURVIVED, f"{test} fails without the change too"
    yield from verdicts.values()


def affordable(covering: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """The first of these tests, at least one, that take no longer than a mutant may."""
    left = SECONDS_PER_MUTANT
    chosen = []
    for test in covering:
        left -= seconds[test]
        if left < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def _task(
    name: str,
    tests: Sequence[str],
    seconds: Mapping[str, float],
    *,
    change: tuple[str, str] | None = None,
    options: Sequence[str] = (),
) -> Task:
    """These tests, file by file, the files with the quickest tests first."""
    by_file: dict[str, list[float]] = defaultdict(list)
    for test in tests:
        by_file[test.split("::")[0]].append(seconds[test])
    files = sorted(by_file, key=lambda file: fmean(by_file[file]))
    return Task(
        name=name,
        body=partial(_run_tests, arguments=[*options, *files], chosen=frozenset(tests)),
        limit_s={test: STALLED_S + 10 * seconds[test] for test in tests},
        change=change,
    )


def _run_tests(
    send: session.Send, _copy: Path, *, arguments: Sequence[str], chosen: frozenset[str]
) -> None:
    session.run(send, arguments, chosen)


def _killer(outcome: Outcome) -> str:
    """The test that noticed, or how the session ended; empty where all passed."""
    if outcome.result is None:
        return f"stopped or dead in {outcome.test}"
    if outcome.result["failed"]:
        return str(outcome.result["failed"][0])
    code = outcome.result["code"]
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{outcome.task.name}: no test ran; {outcome.result['output']}")
    return f"pytest ended with {code} in {outcome.test}" if code else ""


def _failing_unchanged(
    tests: Sequence[str], seconds: Mapping[str, float], pool: Pool
) -> Iterator[str]:
    for outcome in pool.run([_task("nothing changed", tests, seconds)]):
        if outcome.result is None:
            raise RuntimeError(f"unchanged, the tests did not end; they were at {outcome.test}")
        yield from outcome.result["failed"]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _shown(verdict: Verdict, sources: Mapping[str, str]) -> str:
    """A survivor with its diff and what ran."""
    mutant = verdict.mutant
    before = sources[mutant.file]
    diff = unified_diff(before.splitlines(), mutant.apply(before).splitlines(), lineterm="", n=2)
    lines = [
        f"{mutant.file}:{mutant.line} in {mutant.function or 'the module'} survived "
        f"{len(verdict.ran)} of {verdict.covering} tests {verdict.why}",
        *list(diff)[2:],
        *(f"    {test}" for test in verdict.ran[:5]),
        f"    original = {mutant.original!r}",
        f"    mutated = {mutant.mutated!r}",
        "",
    ]
    return "\n".join(lines)


def _summary(report: Mapping[str, Any]) -> Iterator[str]:
    for room, counts in report["rooms"].items():
        yield f"{room}: " + ", ".join(f"{count} {fate}" for fate, count in counts.items())
    yield f"seed {report['seed']}, {report['lines']} lines, {report['minutes']} minutes"


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip()


def _tell(text: str) -> None:
    print(text, flush=True)
