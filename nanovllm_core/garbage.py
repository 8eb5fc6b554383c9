"""What a start leaves behind stays: a collection in the midst of steps need not look at it.

`gc.freeze` concerns the whole process, so engines share it: the last one to close takes it back,
and a program that had frozen objects of its own keeps them frozen. What the program itself held
when an engine started is set aside with the rest, and what of it dies in cycles is collected when
the last engine closes.
"""

from __future__ import annotations

import gc

_num_engines = 0
_frozen_before = False


def freeze_objects() -> None:
    """Set aside every object there is, once more for each engine that starts."""
    global _num_engines, _frozen_before
    if _num_engines == 0:
        _frozen_before = gc.get_freeze_count() > 0
    _num_engines += 1
    gc.collect()
    gc.freeze()


def unfreeze_objects() -> None:
    """The opposite, once for each engine that closes."""
    global _num_engines
    _num_engines -= 1
    if _num_engines == 0 and not _frozen_before:
        gc.unfreeze()
