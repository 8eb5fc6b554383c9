"""A measurement in a process, or a thread, of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What `measure` returns or raises in a new process, which leaves nothing on a device.

    An engine must not follow other work of its process: see "What is captured, and the rules for
    it" in docs/architecture.md.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def run_aside(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns or raises in a new thread, with which its threads of OpenMP end.

    While two threads of a process have such threads, more than there are processors, neither waits
    for them by spinning: an engine on a CPU then takes up to a third longer.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *arguments).result()
