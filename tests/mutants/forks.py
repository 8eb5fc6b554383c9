"""Forked sessions, several at a time, each in a copy of the tree, with a limit on every test."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from . import session

STARTING_S = 60.0
"""Seconds that a session may take until its first test, and after its last."""

Body = Callable[[session.Send, Path], None]
Change = tuple[str, str]
"""A file of the tree, and the text that it holds meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`body` runs in a session; `limit_s` are the seconds that each test may take at most."""

    name: str
    body: Body
    limit_s: Mapping[str, float] = field(default_factory=dict)
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`result` is the body's last message; None if it died or was stopped during `test`."""

    task: Task
    result: Mapping[str, Any] | None
    test: str


@dataclass
class _Running:
    task: Task
    copy: Path
    pid: int
    pipe: int
    deadline: float
    buffer: bytes = b""
    test: str = "the start"
    result: Mapping[str, Any] | None = None

    def take_messages(self, longest_s: float) -> bool:
        """Read what the session sent; False where it has ended."""
        data = os.read(self.pipe, 1 << 20)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "test" in message:
                self.test = message["test"]
                self.deadline = monotonic() + self.task.limit_s.get(self.test, longest_s)
            else:
                self.result = message
        return bool(data) and self.result is None

    def end(self) -> None:
        """Kill what is left of the session and of what it started, and undo its change."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


class Pool:
    """`jobs` copies of the `files` of `root`, under `folder`; modules come from their `imports`."""

    def __init__(
        self, root: Path, files: Sequence[str], folder: Path, imports: Sequence[str], jobs: int
    ) -> None:
        self.imports = imports
        self._mtimes = count(1_000_000_000)
        self._copies = [folder / str(job) / "tree" for job in range(jobs)]
        for copy in self._copies:
            for file in files:
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, copy / file)

    def run(self, tasks: Iterable[Task], longest_s: float = 600.0) -> Iterator[Outcome]:
        """The outcomes of tasks as they end; `longest_s` is the limit of a test without one."""
        waiting, free = iter(tasks), list(self._copies)
        running: list[_Running] = []
        try:
            while True:
                while free and (task := next(waiting, None)):
                    running.append(self._start(task, free.pop()))
                if not running:
                    return
                for ended in self._wait(running, longest_s):
                    running.remove(ended)
                    ended.end()
                    self._restore(ended)
                    free.append(ended.copy)
                    yield Outcome(task=ended.task, result=ended.result, test=ended.test)
        finally:
            for left in running:
                left.end()
                self._restore(left)

    def _start(self, task: Task, copy: Path) -> _Running:
        if task.change:
            self._write(copy, *task.change)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                session.become_session(copy, self.imports)
                task.body(session.sender(theirs), copy)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        return _Running(task, copy, pid, ours, monotonic() + STARTING_S)

    def _write(self, copy: Path, file: str, text: str) -> None:
        """Keep the original beside the file; no two texts of a file have the same time.

        Python and pytest take a file for unchanged whose size and seconds are those they know.
        """
        place = copy / file
        place.rename(place.with_suffix(".original"))
        place.write_text(text, encoding="utf-8")
        now = next(self._mtimes)
        os.utime(place, (now, now))

    def _restore(self, ended: _Running) -> None:
        if ended.task.change:
            place = ended.copy / ended.task.change[0]
            place.with_suffix(".original").replace(place)

    @staticmethod
    def _wait(running: list[_Running], longest_s: float) -> list[_Running]:
        """Those that ended or are overdue; waits until there is news."""
        with selectors.DefaultSelector() as selector:
            for one in running:
                selector.register(one.pipe, selectors.EVENT_READ, one)
            left = max(0.0, min(one.deadline for one in running) - monotonic())
            told = [key.data for key, _ in selector.select(left)]
        ended = [one for one in told if not one.take_messages(longest_s)]
        late = [one for one in running if one not in told and one.deadline < monotonic()]
        return ended + late
