"""The objects that a plugin keeps: whether they become more with everything that it is given."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

SHARED = (type, ModuleType, BuiltinFunctionType)
"""Code, of which all plugins reach much."""


def count_reachable(one: object, made_by: type) -> int:
    """The objects that `one` keeps, or the class that made it, or this class' module."""
    known = [one, *vars(made_by).values(), *vars(sys.modules[made_by.__module__]).values()]
    found: dict[int, Any] = {}
    reached = {id(one): one for one in known if not isinstance(one, SHARED)}
    while reached:
        found |= reached
        behind = {id(one): one for one in _referents(reached.values())}
        reached = {
            key: one
            for key, one in behind.items()
            if key not in found and not isinstance(one, SHARED)
        }
    return len(found)


def _referents(reached: Iterable[Any]) -> list[Any]:
    """What these refer to; of a function what it closes over, not the module around it."""
    functions = [one for one in reached if isinstance(one, FunctionType)]
    others = [one for one in reached if not isinstance(one, FunctionType)]
    closed = [cell for one in functions for cell in one.__closure__ or ()]
    return [*closed, *(one.__dict__ for one in functions), *gc.get_referents(*others)]


def assert_steady(kept: Sequence[int], given: int, remedy: str) -> None:
    """`kept` objects after each of some rounds: they grow by less than half of `given` in one.

    A cache of bounded size grows at first; what keeps all that it is given grows in every round.
    """
    grown = min(later - before for before, later in pairwise(kept))
    counts = ", ".join(map(str, kept))
    assert grown < given / 2, (
        f"after each of {len(kept)} rounds of {given} it keeps {counts} objects: {remedy}"
    )
