"""Progress bars that are quiet where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """Iterate with a progress bar on stderr, or without one where stderr is not a terminal."""
    if not sys.stderr.isatty():
        return items
    return rich_track(items, description, console=Console(stderr=True), transient=True)


@contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function of (done, total) that moves a bar on stderr; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
