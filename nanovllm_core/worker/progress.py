"""Progress bars for start-up, silent when stderr is not a terminal; and its time by part."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


@contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function of (done, total) that moves a bar; nothing is drawn without a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
