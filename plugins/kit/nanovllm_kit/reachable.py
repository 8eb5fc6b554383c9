"""The objects that a plugin keeps: whether they become more with everything that it is given."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Code, of which all plugins reach much."""


def count_reachable(start: Any) -> int:
    """The objects that `start` keeps, itself included."""
    found: dict[int, Any] = {}
    reached = {id(start): start}
    while reached:
        found |= reached
        behind = {id(one): one for one in gc.get_referents(*reached.values())}
        reached = {
            key: one
            for key, one in behind.items()
            if key not in found and not isinstance(one, SHARED)
        }
    return len(found)


def assert_steady(kept: Sequence[int], given: int, remedy: str) -> None:
    """`kept` objects after each of some rounds: they grow by less than half of `given` in one.

    A cache of bounded size grows at first; what keeps all that it is given grows in every round.
    """
    grown = min(later - before for before, later in pairwise(kept))
    counts = ", ".join(map(str, kept))
    assert grown < given / 2, (
        f"after each of {len(kept)} rounds of {given} it keeps {counts} objects: {remedy}"
    )
