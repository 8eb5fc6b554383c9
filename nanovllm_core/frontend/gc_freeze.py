"""Freezes the objects that a start made, so that garbage collections in steps skip them.

`gc.freeze` concerns the whole process, so engines and servers share it. It is undone while one of
them closes, or the cycles of that engine, and the memory of its device with them, would stay for
ever; what the others set aside is then set aside again. This also undoes a `gc.freeze` of the
program's own: there is no telling the two apart (CPython 3.12 starts with some objects frozen).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_num_frozen = 0
"""Engines and servers that have set objects aside."""
_num_under_way = 0
_was_enabled = True
"""Before the first of those that are under way."""
_lock = Lock()


@contextmanager
def no_collections() -> Iterator[None]:
    """Around a start, the making of many requests, and the parsing of a body: what they make stays
    for now, so collections of it only cost time.

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
    """Set aside every object there is, once more for each engine or server that starts."""
    global _num_frozen
    gc.collect()
    gc.freeze()
    _num_frozen += 1  # Not before: an interrupted collection leaves nothing to be counted.


@contextmanager
def thawed_objects() -> Iterator[None]:
    """Around the closing of one that had frozen: what it drops can be collected within."""
    global _num_frozen
    _num_frozen -= 1
    gc.unfreeze()
    try:
        yield
    finally:
        if _num_frozen:
            gc.freeze()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """While a server runs: what its start made is set aside."""
    freeze_objects()
    try:
        yield
    finally:
        with thawed_objects():
            pass
