"""Progress bars that are quiet where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """Iterate with a progress bar on stderr, or without one where stderr is not a terminal."""
    if not sys.stderr.isatty():
        return items
    return rich_track(items, description, console=Console(stderr=True), transient=True)
