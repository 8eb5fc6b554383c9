"""Which test runs which lines, recorded once and kept per test file until a source changes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from . import session
from .forks import Pool, Task
from .operators import Mutant

OURS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Project:
    """What is changed, and what may notice.

    `rooms` are the folders whose files are changed, `imports` those that modules are imported from,
    `tests` globs of test files, less `others`: tests that make environments, run documents, or
    need a GPU.
    """

    root: Path
    rooms: Sequence[str]
    tests: Sequence[str]
    others: Sequence[str] = ()
    imports: Sequence[str] = (".",)

    @cached_property
    def files(self) -> list[str]:
        """The tree: what git tracks, and what it neither tracks nor ignores."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        return sorted({name for name in listed if (self.root / name).is_file()})

    def test_files(self) -> list[str]:
        """The longest files come first, since they take longest."""
        found = {path for glob in self.tests for path in self.root.glob(glob)}
        chosen = [
            path for path in found if not any(path.match(f"{self.root}/{o}") for o in self.others)
        ]
        chosen.sort(key=lambda path: (-path.stat().st_size, path))
        return [path.relative_to(self.root).as_posix() for path in chosen]

    def sources(self, room: str) -> Iterator[tuple[str, str]]:
        """(file, text) of every module of a room."""
        for path in sorted((self.root / room).glob("*.py")):
            yield path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8")


@dataclass
class Recording:
    """`seconds` of CPU that each test took; the tests that run each line, by file and line.

    `direct` are those that run the line themselves, `shared` those of a test file in which a
    fixture does: set up for one test, it may serve them all.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    direct: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    shared: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    failed: list[str] = field(default_factory=list)

    def add(self, result: Mapping[str, object]) -> None:
        """Take in what `session.record` sent about one test file."""
        passed: dict[str, float] = result["passed"]  # type: ignore[assignment]  # it was JSON
        lines: dict[str, dict[str, list[str]]] = result["lines"]  # type: ignore[assignment]  # same
        self.seconds |= passed
        self.failed += result["failed"]  # type: ignore[arg-type]  # same
        for file, by_line in lines.items():
            for line, contexts in by_line.items():
                for context in contexts:
                    test, _, phase = context.rpartition("|")
                    if test in passed:
                        self.direct[file, int(line)].add(test)
                    if phase == "setup":
                        self.shared[file, int(line)].update(passed)

    def tests_of(self, mutant: Mutant, mentions: Mapping[str, set[tuple[str, int]]]) -> list[str]:
        """The tests that run a mutant's lines: those that do so themselves first, then by time."""
        places = {(mutant.file, line) for line in mutant.lines}
        for name in mutant.names:
            places |= mentions[name]
        direct = set().union(*(self.direct.get(place, ()) for place in places))
        shared = set().union(*(self.shared.get(place, ()) for place in places)) - direct
        by_time = sorted(direct, key=lambda test: (self.seconds[test], test))
        return by_time + sorted(shared, key=lambda test: (self.seconds[test], test))


def mentions_of(sources: Mapping[str, str]) -> dict[str, set[tuple[str, int]]]:
    """Every name, and the (file, line) places where it stands."""
    places: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for file, source in sources.items():
        for number, line in enumerate(source.splitlines(), start=1):
            for name in re.findall(r"[^\W\d]\w*", line):
                places[name].add((file, number))
    return places


def record(project: Project, pool: Pool, cache: Path, tell: Callable[[str], None]) -> Recording:
    """Run the tests of every file whose recording in `cache` is missing or out of date."""
    sources, tests = _digests(project)
    folder = cache / sources
    folder.mkdir(parents=True, exist_ok=True)
    for old in cache.iterdir():
        if old != folder:
            shutil.rmtree(old)
    places = {file: folder / f"{digest}.json" for file, digest in tests.items()}
    missing = [file for file, place in places.items() if not place.exists()]
    tasks = (
        Task(name=file, body=partial(_record_one, file=file, rooms=project.rooms))
        for file in missing
    )
    for done, outcome in enumerate(pool.run(tasks), start=1):
        if outcome.result is None:
            raise RuntimeError(f"{outcome.task.name} did not end; it was at {outcome.test}")
        if not outcome.result["passed"] and "output" in outcome.result:
            tell(f"nothing ran in {outcome.task.name}: {outcome.result['output']}")
        places[outcome.task.name].write_text(json.dumps(outcome.result))
        taken = sum(outcome.result["passed"].values())
        tell(f"recorded {done}/{len(missing)} {outcome.task.name} {taken:.1f} s")
    recording = Recording()
    for place in places.values():
        recording.add(json.loads(place.read_text()))
    return recording


def _record_one(send: session.Send, copy: Path, *, file: str, rooms: Sequence[str]) -> None:
    session.record(send, copy, [file], rooms)


def _digests(project: Project) -> tuple[str, dict[str, str]]:
    """A digest of every module that is no test, and one of the text of each test file."""
    sources = hashlib.sha256()
    for file in project.files:
        path = project.root / file
        if path.suffix == ".py" and not path.name.startswith("test_") and OURS not in path.parents:
            sources.update(path.read_bytes())
    tests = {
        file: hashlib.sha256(file.encode() + (project.root / file).read_bytes()).hexdigest()[:16]
        for file in project.test_files()
    }
    return sources.hexdigest()[:16], tests
