"""Progress bars for start-up, silent when stderr is not a terminal; and its time by part."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, track as rich_track

T = TypeVar("T")


class Laps:
    """Seconds by the name of what was done, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Count the time since the last call under `name`; equal names add up."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """Iterate with a progress bar on stderr, or without one where stderr is not a terminal."""
    if not sys.stderr.isatty():
        return items
    return rich_track(items, description, console=Console(stderr=True), transient=True)


@contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function of (done, total) that moves a bar; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
