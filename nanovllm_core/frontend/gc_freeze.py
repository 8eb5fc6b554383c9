"""Freezes the objects that a start made, so that garbage collections in steps skip them.

`gc.freeze` concerns the whole process, so engines share it. It is undone while an engine closes,
or the cycles of that engine, and the memory of its device with them, would stay for ever; what the
others set aside is then set aside again. An engine that closes also undoes a `gc.freeze` of the
program's own: there is no telling the two apart (CPython 3.12 starts with some objects frozen).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_num_engines = 0
_num_under_way = 0
_was_enabled = True
"""Before the first of those that are under way."""
_lock = Lock()


@contextmanager
def no_collections() -> Iterator[None]:
    """Around a start, and the making of many requests: what they make stays, so collections of it
    only cost time.

    Those of several threads may overlap: the last to end lets collections begin again.
    """
    global _num_under_way, _was_enabled
    with _lock:
        if _num_under_way == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_under_way += 1
    try:
        yield
    finally:
        with _lock:
            _num_under_way -= 1
            if _num_under_way == 0 and _was_enabled:
                gc.enable()


def freeze_objects() -> None:
    """Set aside every object there is, once more for each engine that starts."""
    global _num_engines
    gc.collect()
    gc.freeze()
    _num_engines += 1  # Not before: an interrupted collection leaves no engine to be counted.


@contextmanager
def thawed_objects() -> Iterator[None]:
    """Around the closing of an engine that had frozen: what it drops can be collected within."""
    global _num_engines
    _num_engines -= 1
    gc.unfreeze()
    try:
        yield
    finally:
        if _num_engines:
            gc.freeze()
