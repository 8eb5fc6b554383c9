"""A measurement in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What `measure` returns or raises in a new process, which leaves nothing on a device.

    An engine must not follow other work of its process: see "What is captured, and the rules for
    it" in docs/architecture.md.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()
